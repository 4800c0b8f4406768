"""Mirror of the documents in an engine's device, host memory and disk."""

from ragorder.trie.mirror.pool import TieredPool
from ragorder.trie.mirror.residency import TieredResidency
from ragorder.trie.mirror.tiers import Arrival, MirroredTier, TierMirror

__all__ = ["Arrival", "MirroredTier", "TierMirror", "TieredPool", "TieredResidency"]
