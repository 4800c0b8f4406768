"""Searches in pieces (HedraRAG section 4.2)."""

from __future__ import annotations

import math

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["Split"]


class Split:
    """Cuts a search into pieces that others share, of the index's own `Budget`. Without it, or where the pieces'
    overhead takes more than they save, a search is scanned whole."""

    name = "split"

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        for piece in wavefront.starting:
            if piece.worker == "search" and facts.cuts and self.gain_s(piece, facts) > 0:
                piece.split = True
                piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """Eq. 1 at its maximum, mb = sqrt(2 * overhead * search)."""
        search_s, budget = facts.search_s.value, getattr(facts.search, "budget", None)
        if search_s is None or budget is None:
            return math.inf
        return search_s / 2 - math.sqrt(2 * budget.overhead_s * search_s)
