"""Searches for the queries of unfinished generations (HedraRAG section 4.3)."""

from __future__ import annotations

import math

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.nodes import Retrieval
from ragorder.pipelining.workflow.trace import PieceTrace
from ragorder.pipelining.workflow.transformations.speculate_generation import SpeculateGeneration
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["SpeculateRetrieval"]


class SpeculateRetrieval:
    """Embeds the query that follows from a generation's text so far and searches for it in pieces that due searches
    leave idle. If the final query is the same, the search goes on as the due one; otherwise what it has found orders
    the due one's clusters.

    - `bound`: of all searches, 32 in the paper
    - `every`: tokens between two looks at a generation; queries that have drifted least since the last look go first
    - `embeddings`: of such queries at a time
    - `generations`: speculated on across the searches (None: a search is worth what it saves by itself)

    Raises ValueError for values below 1.
    """

    name = "speculate_retrieval"

    def __init__(
        self, bound: int = 32, *, every: int = 16, embeddings: int = 1, generations: SpeculateGeneration | None = None
    ) -> None:
        for name, value in (("bound", bound), ("every", every), ("embeddings", embeddings)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.bound = bound
        self.every = every
        self.embeddings = embeddings
        self.generations = generations

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        if not facts.cuts:
            return
        written = [piece for piece in wavefront.progressed("engine") if self._concerns(piece)]
        room = min(self.embeddings - facts.embedding_ahead, self.bound - wavefront.count("search"))
        for generation in sorted(written, key=lambda piece: piece.drift):
            request = generation.request
            if room <= 0:
                request.trace.refused += 1
                continue
            generation.looked = generation.tokens
            generation.looks += 1
            for run in request.foreseen(generation):
                if not isinstance(run.node, Retrieval):
                    continue
                trace = PieceTrace(run.id, "speculative", "search", stages_ahead=1, applied=[self.name])
                piece = Piece(request, run, trace, generation, looks=generation.looks)
                if self.gain_s(piece, facts) > 0:
                    room -= 1
                    wavefront.speculate(piece)
                else:
                    request.trace.declined += 1

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """The search and its embedding, at most the rest of the generation, if the query is the final one; otherwise
        what the order of the clusters saves, less an embedding. Either way, what a generation on its results saves."""
        search_s, embed_s = facts.search_s.value, facts.embed_s.value or 0.0
        if piece.after is None or search_s is None:
            return math.inf
        odds, number = facts.odds(piece.after), piece.after.part
        right, gain_s = odds.right(number), odds.gain_s(number, embed_s, embed_s + search_s)
        if right is None or gain_s is None:
            return math.inf
        across_s = 0.0 if self.generations is None else self.generations.across_s(piece, facts)
        return across_s + gain_s + (1 - right) * (max(facts.hint, 0.0) * search_s - embed_s)

    def _concerns(self, piece: Piece) -> bool:
        return piece.tokens - piece.looked >= self.every and bool(piece.request.graph.foreseen(piece.run.id))
