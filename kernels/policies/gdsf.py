"""GDSF, RAGCache's baseline (section 7.4)."""

from __future__ import annotations

from ragorder.kernels.policies.base import Clocked, TierNode, policies

__all__ = ["GDSF"]


@policies.register("gdsf", "often used nodes last")
class GDSF(Clocked):
    """Clock + Frequency: Greedy-Dual-Size-Frequency with a cost proportional to the size, in any unit."""

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency
