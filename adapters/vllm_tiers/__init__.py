"""RAGCache's tiers in stock vLLM (docs/tiers.md), which imports them by path."""

from ragorder.adapters.request_facts import RequestFacts, read_facts
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.adapters.vllm_tiers.versions import SUPPORTED_VLLM, UnsupportedVLLMError, check_vllm

__all__ = ["SUPPORTED_VLLM", "RequestFacts", "TierSettings", "UnsupportedVLLMError", "check_vllm", "read_facts"]
