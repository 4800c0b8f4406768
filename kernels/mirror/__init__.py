"""Mirror of an engine's device, host and disk tiers."""

from ragorder.kernels.mirror.pool import TieredPool
from ragorder.kernels.mirror.residency import TieredResidency
from ragorder.kernels.mirror.tiers import Arrival, MirroredTier, TierMirror

__all__ = ["Arrival", "MirroredTier", "TierMirror", "TieredPool", "TieredResidency"]
