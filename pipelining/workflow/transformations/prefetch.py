"""Prefetch of what the next nodes need: clusters of the index, the system prompt (HedraRAG section 4.5)."""

from __future__ import annotations

from ragorder.pipelining.warmup import WarmUp
from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.nodes import Generation, NodeQuestion
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["Prefetch"]


class Prefetch:
    """Loads the clusters of a foreseen query into the index's fast tier (TeleRAG), and during a search prefills the
    system prompt of the generation that follows, if the engine does not hold it (RAGCache++ section 3.6)."""

    name = "prefetch"

    def __init__(self, warm_up: WarmUp[NodeQuestion] | None = None) -> None:
        self._warm_up = warm_up

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        for piece in wavefront.starting:
            if piece.worker == "search":
                if piece.due:
                    self._warm(piece)
                elif self.gain_s(piece, facts) > 0:
                    piece.prefetch = True
                    piece.trace.applied.append(self.name)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """Of clusters in the fast tier; a warm-up is only started if it is needed."""
        gains = facts.tier_gains
        return 0.0 if gains is None else gains.prefetch_s

    def _warm(self, piece: Piece) -> None:
        graph = piece.request.graph
        follows = any(isinstance(graph.nodes[id], Generation) for id in graph.foreseen(piece.run.id))
        if self._warm_up is not None and follows:
            warming = self._warm_up.start(NodeQuestion("", piece.request.scope))
            if warming is not None:
                piece.trace.applied.append(self.name)
                piece.at_end.append(warming.leave)
