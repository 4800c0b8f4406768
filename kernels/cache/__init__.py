"""KV of documents over device, host and disk, shared by prefix."""

from ragorder.kernels.cache.cache import KnowledgeCache
from ragorder.kernels.cache.disk import DiskSettings
from ragorder.kernels.cache.lease import Lease
from ragorder.kernels.cache.segments import Segment, segments_of
from ragorder.kernels.cache.stats import CacheStats, TierStats, TierTokens
from ragorder.kernels.paging import OutOfBlocksError

__all__ = [
    "CacheStats",
    "DiskSettings",
    "KnowledgeCache",
    "Lease",
    "OutOfBlocksError",
    "Segment",
    "TierStats",
    "TierTokens",
    "segments_of",
]
