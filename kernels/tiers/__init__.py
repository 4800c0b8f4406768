"""KV of documents over device, host and disk, shared by prefix."""

from ragorder.kernels.paging import OutOfBlocksError
from ragorder.kernels.tiers.cache import KnowledgeCache
from ragorder.kernels.tiers.disk import DiskSettings
from ragorder.kernels.tiers.lease import Lease
from ragorder.kernels.tiers.segments import Segment, segments_of
from ragorder.kernels.tiers.stats import CacheStats, TierStats, TierTokens

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
