"""GDSF, RAGCache's baseline (section 7.4)."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import Clocked, TierNode

__all__ = ["GDSF"]


class GDSF(Clocked):
    """Clock + Frequency: Greedy-Dual-Size-Frequency with a cost proportional to the size, in any unit."""

    name: ClassVar[str] = "gdsf"

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency
