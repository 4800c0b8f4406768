"""Clusters in the order of a request's earlier searches (HedraRAG section 4.3)."""

from __future__ import annotations

import math

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.nodes import Retrieval
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["Reorder"]

# To keep a larger top-k of a search, and to order the next one's clusters.
_COST_S = 1e-4
# Without a history nothing is learnt of its use.
_LEAST_SHARE = 0.02


class Reorder:
    """Gives a request's searches a `History`: what the next one finds, it finds earlier."""

    name = "reorder"

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        for piece in wavefront.starting:
            if piece.worker == "search" and facts.cuts and self.gain_s(piece, facts) > 0:
                piece.reorder = True
                piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """Of a request's only search there is none; one ahead of need comes before the due one."""
        if piece.due and not piece.request.searches and not _may_search_again(piece):
            return 0.0
        if facts.search_s.value is None:
            return math.inf
        return max(facts.hint, _LEAST_SHARE) * facts.search_s.value - _COST_S


def _may_search_again(piece: Piece) -> bool:
    graph = piece.request.graph
    return any(isinstance(graph.nodes.get(id), Retrieval) for id in graph.topology.later(piece.run.id))
