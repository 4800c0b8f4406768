"""RAGCache's tiers in stock vLLM: documents' KV on the device, in host memory and on disk (docs/tiers.md).

Only the parts that write a configuration are imported here; vLLM loads the rest by the module paths in it.
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
