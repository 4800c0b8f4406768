"""Mirror of an engine's tiers: what device, host memory and disk hold of the documents of an orderer."""

from ragorder.trie.mirror.pool import TieredPool
from ragorder.trie.mirror.residency import TieredResidency
from ragorder.trie.mirror.tiers import Arrival, MirroredTier, TierMirror

__all__ = ["Arrival", "MirroredTier", "TierMirror", "TieredPool", "TieredResidency"]
