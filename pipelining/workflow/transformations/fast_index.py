"""Hot clusters in a faster place (HedraRAG section 4.4)."""

from __future__ import annotations

import math

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["FastIndex"]


class FastIndex:
    """Notes in the trace which searches are expected to gain by the index's fast tier. `IndexTiers` itself decides for
    each piece by measured costs, with this transformation or without."""

    name = "fast_index"

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        if facts.tiers is None:
            return
        for piece in wavefront.starting:
            if piece.worker == "search" and self.gain_s(piece, facts) > 0:
                piece.fast = True
                piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """The share of a search that the tier has scanned lately, at the difference of the two costs."""
        tiers, search_s = facts.tiers, facts.search_s.value
        if tiers is None:
            return 0.0
        if search_s is None or not tiers.costs.calls:
            return math.inf
        slow_s = facts.search.costs.code_s
        return float(tiers.hit_share * search_s * (1 - tiers.costs.code_s / slow_s))
