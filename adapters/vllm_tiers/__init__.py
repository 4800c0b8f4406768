"""RAGCache's tiers in stock vLLM: documents' KV on the device, in host memory and on disk (docs/tiers.md).

Only what is needed to write a configuration is imported here; the rest is loaded by vLLM, which the configuration tells
where it is.
"""

from ragorder.adapters.request_facts import RequestFacts, read_facts
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.adapters.vllm_tiers.versions import SUPPORTED_VLLM, UnsupportedVLLMError, check_vllm

__all__ = [
    "SUPPORTED_VLLM",
    "RequestFacts",
    "TierSettings",
    "UnsupportedVLLMError",
    "check_vllm",
    "read_facts",
]
