"""PGDSF, RAGCache's own policy (section 5.1)."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import Clocked, TierNode

__all__ = ["PGDSF"]


class PGDSF(Clocked):
    """Prefix-aware Greedy-Dual-Size-Frequency: Clock + Frequency x Cost / Size (formula 2), with formula 4 for
    Cost / Size: what a new token cost the requests that had to compute the node, on average.

    Algorithm 1 prints the line that sets the priority (9) inside the branch for what is not cached. The text has "when
    a document is retrieved, its node's clock is set and its priority is adjusted", and otherwise no hit would ever
    count: it is set at every use.
    """

    name: ClassVar[str] = "pgdsf"

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency * node.cost
