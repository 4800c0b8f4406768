"""GDSF, as RAGCache compares itself with it (section 7.4)."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import Clocked, TierNode

__all__ = ["GDSF"]


class GDSF(Clocked):
    """Greedy-Dual-Size-Frequency with a cost that is proportional to the size, as the paper sets it: Clock + Frequency.

    The unit of cost is free, as only sums of such terms are compared: it is that of one size.
    """

    name: ClassVar[str] = "gdsf"

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency
