"""PGDSF, RAGCache's own policy (section 5.1)."""

from __future__ import annotations

from ragorder.kernels.policies.base import Clocked, TierNode, policies

__all__ = ["PGDSF"]


@policies.register("pgdsf", "often used and expensive nodes last (RAGCache)")
class PGDSF(Clocked):
    """Prefix-aware Greedy-Dual-Size-Frequency: Clock + Frequency x Cost / Size (formulas 2 and 4)."""

    def priority(self, node: TierNode) -> float:
        # At every use, as the paper's text says; Algorithm 1 prints line 9 inside the branch for uncached nodes, where
        # no hit would ever count.
        return self.clock + node.frequency * node.cost
