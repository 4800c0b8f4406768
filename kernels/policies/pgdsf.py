"""PGDSF, RAGCache's own policy (section 5.1)."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import Clocked, TierNode

__all__ = ["PGDSF"]


class PGDSF(Clocked):
    """Prefix-aware Greedy-Dual-Size-Frequency: Clock + Frequency x Cost / Size (formulas 2 and 4)."""

    name: ClassVar[str] = "pgdsf"

    def priority(self, node: TierNode) -> float:
        # At every use, as the paper's text says; Algorithm 1 prints line 9 inside the branch for uncached nodes, where
        # no hit would ever count.
        return self.clock + node.frequency * node.cost
