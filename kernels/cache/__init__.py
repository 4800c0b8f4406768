"""KV of documents over device, host and disk, shared by prefix (RAGCache section 5.1; states in `node`)."""

from ragorder.kernels.cache.cache import KnowledgeCache
from ragorder.kernels.cache.disk import DiskSettings
from ragorder.kernels.cache.lease import KVLease
from ragorder.kernels.cache.segments import Segment, segments_of
from ragorder.kernels.cache.stats import CacheStats, CacheTierStats, TierTokens
from ragorder.kernels.paging import OutOfBlocksError

__all__ = [
    "CacheStats",
    "CacheTierStats",
    "DiskSettings",
    "KVLease",
    "KnowledgeCache",
    "OutOfBlocksError",
    "Segment",
    "TierTokens",
    "segments_of",
]
