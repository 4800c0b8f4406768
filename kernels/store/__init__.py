"""Chunk stores: bytes by key in a bounded folder, kept over restarts."""

try:
    import xxhash  # noqa: F401
except ImportError as error:
    message = (
        "the chunk store needs xxhash: pip install 'ragorder[tiers]', or 'ragorder[torch]' for the embedded engine"
    )
    raise ImportError(message, name=error.name) from error

from ragorder.kernels.store.counters import StoreCounters
from ragorder.kernels.store.folder import StoreRefusedError
from ragorder.kernels.store.scan import Survey, survey
from ragorder.kernels.store.store import ChunkStore

__all__ = ["ChunkStore", "StoreCounters", "StoreRefusedError", "Survey", "survey"]
