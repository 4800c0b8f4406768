"""Hot clusters in a faster place (HedraRAG section 4.4)."""

from __future__ import annotations

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["FastIndex"]


class FastIndex:
    """Lets searches use the index's fast tier for the clusters that it holds. Without it, or where the tier is expected
    to take longer than the cores, these scan all; `IndexTiers` then measures it once after each exchange of clusters.
    """

    name = "fast_index"

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        for piece in wavefront.starting:
            if piece.worker == "search" and self.gain_s(piece, facts) > 0:
                piece.fast = True
                piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        gains = facts.tier_gains
        return 0.0 if gains is None else gains.scan_s
