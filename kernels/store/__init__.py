"""Chunk store: bytes by key in a bounded folder."""

from ragorder.common.extras import install_hint

try:
    import xxhash  # noqa: F401
except ImportError as error:
    message = f"the chunk store needs xxhash: {install_hint('vllm')}, or '.[torch]' for the embedded engine"
    raise ImportError(message, name=error.name) from error

from ragorder.kernels.store.folder import StoreRefusedError
from ragorder.kernels.store.scan import StoreCounters, Survey, survey
from ragorder.kernels.store.store import ChunkStore

__all__ = ["ChunkStore", "StoreCounters", "StoreRefusedError", "Survey", "survey"]
