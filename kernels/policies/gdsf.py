"""GDSF, RAGCache's baseline (section 7.4)."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import Clocked, TierNode

__all__ = ["GDSF"]


class GDSF(Clocked):
    """Greedy-Dual-Size-Frequency with the paper's cost, proportional to the size: Clock + Frequency. The unit of cost
    is free, as only such sums are compared."""

    name: ClassVar[str] = "gdsf"

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency
