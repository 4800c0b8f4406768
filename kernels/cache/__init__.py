"""Documents' KV on device, host and disk, shared by prefix (RAGCache 5.1)."""

from ragorder.kernels.cache.cache import KnowledgeCache
from ragorder.kernels.cache.contents import Contents, CopyKind
from ragorder.kernels.cache.disk import DiskSettings
from ragorder.kernels.cache.lease import Borrowed, KVLease
from ragorder.kernels.cache.node import CopyLocation
from ragorder.kernels.cache.segments import Segment, content_of, segments_of
from ragorder.kernels.cache.stats import CacheStats, CacheTierStats, TierTokens
from ragorder.kernels.paging import OutOfBlocksError

__all__ = [
    "Borrowed",
    "CacheStats",
    "CacheTierStats",
    "Contents",
    "CopyKind",
    "CopyLocation",
    "DiskSettings",
    "KVLease",
    "KnowledgeCache",
    "OutOfBlocksError",
    "Segment",
    "TierTokens",
    "content_of",
    "segments_of",
]
