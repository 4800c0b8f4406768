"""Generation on provisional documents (HedraRAG section 4.3, RAGCache Algorithm 2)."""

from __future__ import annotations

import math

from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.nodes import Generation
from ragorder.pipelining.workflow.trace import PieceTrace
from ragorder.pipelining.workflow.wavefront import ANY_PART, Piece, Wavefront

__all__ = ["SpeculateGeneration"]


class SpeculateGeneration:
    """Starts the generation that follows a search on the documents found so far; it is used only if its request equals
    the final one.

    - `bound`: of the generations on the engine, 16 in the paper; the engine's `EngineLoad` bounds those that wait for
      their first token. Searches whose results are nearest to their query go first.
    - `odds`: where it has saved time in recent searches of the same edge (False: Algorithm 2, wherever there is room)
    - `across`: also on what a search ahead of need has found, while the generation before it still runs: two stages
      ahead, where a prompt shows the documents that an answer leads to and not the answer itself
    - `recalled_only`: only on what the request's earlier searches recall, before any cluster is scanned (RaLMSpec)

    Raises ValueError for a bound below 1.
    """

    name = "speculate_generation"

    def __init__(self, bound: int = 16, *, odds: bool = True, across: bool = True, recalled_only: bool = False) -> None:
        if bound < 1:
            raise ValueError(f"bound must be at least 1 generation, got {bound}")
        self.bound = bound
        self.odds = odds
        self.across = across
        self.recalled_only = recalled_only

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None:
        searches = [piece for piece in wavefront.progressed("search") if self._concerns(piece)]
        for search in sorted(searches, key=lambda piece: (not piece.due, _distance(piece, facts))):
            request = search.request
            # A speculation takes the place of the search's last one.
            replaced = search.speculated is not None and search.ahead > 0
            if not self._has_room(wavefront, facts, int(replaced)):
                request.trace.refused += 1
                continue
            runs = [run for run in request.foreseen(search) if isinstance(run.node, Generation)]
            for run in runs:
                stages = 1 if search.due else 2
                trace = PieceTrace(run.id, "speculative", "engine", stages_ahead=stages, applied=[self.name])
                piece = Piece(request, run, trace, search)
                if self.gain_s(piece, facts) <= 0:
                    request.trace.declined += 1
                elif not self._has_room(wavefront, facts, replaced * len(runs)) or not _admit(piece, facts):
                    request.trace.refused += 1
                else:
                    wavefront.speculate(piece)

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """The rest of the search, at most the generation, if the documents are right. A wrong prefill may keep the
        engine busy beyond the search, and holds up every other generation on it meanwhile."""
        if not self.odds or piece.after is None:
            return math.inf
        odds, part = facts.odds(piece.after), piece.after.part
        gain_s = _gain_s(odds, ANY_PART if odds.right(part) is None else part, facts)
        return math.inf if gain_s is None else gain_s

    def across_s(self, search: Piece, facts: Facts) -> float:
        """Seconds that a generation on what a search ahead of need finds saves on average."""
        graph = search.request.graph
        if not self.across or not any(isinstance(graph.nodes[id], Generation) for id in graph.foreseen(search.run.id)):
            return 0.0
        if not self.odds:
            return math.inf
        odds = facts.odds(search)
        parts = [part for part in search.parts if odds.right(part) is not None] or [ANY_PART]
        gains_s = [_gain_s(odds, part, facts) for part in parts]
        known_s = [gain_s for gain_s in gains_s if gain_s is not None]
        return max(0.0, *known_s) if known_s else math.inf

    def _has_room(self, wavefront: Wavefront, facts: Facts, replaced: int) -> bool:
        """Beside the due generations, those included that are about to be sent."""
        running = wavefront.count("engine") - replaced
        pending = facts.load.pending + wavefront.unsent
        return running < self.bound and wavefront.queue.has_room(running) and pending < facts.load.max_prefill_bs

    def _concerns(self, piece: Piece) -> bool:
        if piece.stage is None or not (piece.due or self.across):
            return False
        return not (self.recalled_only and piece.stage.number)


def _gain_s(odds: SpeculationGain, part: int, facts: Facts) -> float | None:
    """None: nothing is known yet."""
    prefill_s, generation_s = facts.prefill_s, facts.generation_s.value
    if prefill_s is None:
        return None
    right, gain_s = odds.right(part), odds.gain_s(part, prefill_s, max(prefill_s, generation_s or 0.0))
    if right is None or gain_s is None:
        return None
    others = facts.wavefront.count("engine", speculative=False)
    # The mean was measured with others' prefills in the same iterations.
    alone_s = prefill_s / (1 + facts.load.pending)
    return gain_s - (1 - right) * others * alone_s


def _admit(piece: Piece, facts: Facts) -> bool:
    """In the same cycle the next one has to count it."""
    piece.admission = admission = facts.load.admit()
    if admission is not None:
        piece.at_end.append(admission.end)
    return admission is not None


def _distance(piece: Piece, facts: Facts) -> float:
    distances = piece.stage.distances[0] if piece.stage is not None else ()
    mean = sum(map(float, distances)) / max(1, len(distances))
    return -mean if getattr(facts.search, "similarity", False) else mean
