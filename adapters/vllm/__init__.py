"""Live vLLM servers, and vLLM in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.vllm.cache_config import CacheConfig, read_cache_config
from ragorder.adapters.vllm.kv_events import EventCounters, KVEventSubscriber
from ragorder.common.extras import needs

if TYPE_CHECKING:
    from ragorder.adapters.vllm.async_engine import AsyncVLLM
    from ragorder.adapters.vllm.middleware import OrderDocuments

__all__ = [
    "AsyncVLLM",
    "CacheConfig",
    "EventCounters",
    "KVEventSubscriber",
    "OrderDocuments",
    "ServerError",
    "read_cache_config",
]


def __getattr__(name: str) -> Any:
    """Import what is used: the engine brings the OpenAI client, the middleware needs the extra `proxy`."""
    if name == "AsyncVLLM":
        from ragorder.adapters.vllm.async_engine import AsyncVLLM

        return AsyncVLLM
    if name == "OrderDocuments":
        with needs("proxy", "ordering inside a server"):
            from ragorder.adapters.vllm.middleware import OrderDocuments
        return OrderDocuments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
