"""Live vLLM servers, and vLLM in this process."""

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.vllm.async_engine import AsyncVLLM
from ragorder.adapters.vllm.cache_config import CacheConfig, read_cache_config
from ragorder.adapters.vllm.kv_events import EventCounters, KVEventSubscriber

__all__ = ["AsyncVLLM", "CacheConfig", "EventCounters", "KVEventSubscriber", "ServerError", "read_cache_config"]
