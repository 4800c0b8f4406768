"""Transformations of the wavefront (HedraRAG 4.5)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.warmup import WarmUp
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.nodes import Generation, NodeId, NodeQuestion, Retrieval, Step
from ragorder.pipelining.workflow.result import Worker, WorkItemTrace
from ragorder.pipelining.workflow.wavefront import ANY_PART, KNOWN, Measurements, Wavefront, WorkItem


class Transformation(Protocol):
    """A change of the wavefront, applied on the event loop in each scheduling cycle. Without an optional
    `reads_tokens(graph, node, measured)` all generations are streamed."""

    name: str

    def apply(self, wavefront: Wavefront, measured: Measurements, /) -> None: ...

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        """Return the mean seconds saved, inf before anything is measured; it is applied if positive."""


class _WithoutTokens:
    def reads_tokens(self, graph: CompiledGraph, node: NodeId, measured: Measurements, /) -> bool:
        return False


class _Mark(_WithoutTokens, ABC):
    name: str
    flag: str
    worker: Worker = "search"
    shared_only = False

    def apply(self, wavefront: Wavefront, measured: Measurements, /) -> None:
        if self.shared_only and not measured.cuts:
            return
        for item in wavefront.starting:
            if item.worker == self.worker and self.gain_s(item, measured) > 0:
                setattr(item, self.flag, True)
                item.trace.applied.append(self.name)

    @abstractmethod
    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float: ...


class Split(_Mark):
    """Cuts a search into parts, between which others run, by the index's `Budget`."""

    name, flag, shared_only = "split", "split", True

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        """Return the maximum of Eq. 1."""
        search_s, budget = measured.search_s.value, getattr(measured.search, "budget", None)
        if search_s is None or budget is None:
            return math.inf
        return search_s / 2 - math.sqrt(2 * budget.overhead_s * search_s)


# Time to keep a larger top-k of a search and to order the clusters of the next one.
_COST_S = 1e-4
# Least share of a search that a history is expected to save: without a history nothing would be learnt.
_LEAST_SHARE = 0.02


class Reorder(_Mark):
    """Gives a request's searches a `History`, so that later ones find their results earlier."""

    name, flag, shared_only = "reorder", "reorder", True

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        """Return 0 for a request's only search."""
        if item.due and not item.request.searches and not _may_search_again(item):
            return 0.0
        if measured.search_s.value is None:
            return math.inf
        return max(measured.hint, _LEAST_SHARE) * measured.search_s.value - _COST_S


def _may_search_again(item: WorkItem) -> bool:
    graph = item.request.graph
    return any(isinstance(graph.nodes.get(id), Retrieval) for id in graph.topology.later(item.run.id))


_ORDERING_COST_S = 2e-4
# Least expected share: documents that are not ordered are not found in the cache, nor are those of first requests.
_LEAST_SHARED = 0.1


class OrderDocuments(_Mark):
    """Has documents ordered for the engine's prefix cache instead of by rank."""

    name, flag, worker = "order_documents", "ordered", "engine"

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        if not isinstance(item.node, Generation) or not item.node.documents:
            return 0.0
        share, prefill_s = measured.cached_share.value, measured.prefill_s
        if share is None or prefill_s is None:
            return math.inf
        return max(share, _LEAST_SHARED) * prefill_s - _ORDERING_COST_S


class WarmSystemPrompt(_WithoutTokens):
    """Has an uncached system prompt prefilled during a search before a generation."""

    name = "warm_system_prompt"

    def __init__(self, warm_up: WarmUp[NodeQuestion]) -> None:
        self._warm_up = warm_up

    def apply(self, wavefront: Wavefront, measured: Measurements, /) -> None:
        for item in wavefront.starting:
            if self.gain_s(item, measured) > 0:
                warming = self._warm_up.start(NodeQuestion("", item.request.scope))
                if warming is not None:
                    item.trace.applied.append(self.name)
                    item.at_end.append(warming.leave)

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        graph = item.request.graph
        if item.worker != "search" or not item.due:
            return 0.0
        follows = any(isinstance(graph.nodes[id], Generation) for id in graph.next_nodes(item.run.id))
        return math.inf if follows else 0.0


class SpeculateGeneration(_WithoutTokens):
    """Starts the generation after a search with the documents found so far, within the budget (`Spending`).

    - `bound`: most generations on the engine (paper: 16); searches with the nearest results go first
    - `odds`: only where it saved time in recent searches of the same edge (False: Algorithm 2, if there is room)
    - `across`: also with a speculative search's results, while the generation before it still runs
    - `recalled_only`: only with results of the request's earlier searches, before a cluster is scanned (RaLMSpec)
    """

    name = "speculate_generation"

    def __init__(self, bound: int = 16, *, odds: bool = True, across: bool = True, recalled_only: bool = False) -> None:
        if bound < 1:
            raise ValueError(f"bound must be at least 1 generation, got {bound}")
        self.bound = bound
        self.odds = odds
        self.across = across
        self.recalled_only = recalled_only

    def apply(self, wavefront: Wavefront, measured: Measurements, /) -> None:
        searches = [item for item in wavefront.progressed("search") if self._concerns(item)]
        for search in sorted(searches, key=lambda item: (not item.due, _distance(item, measured))):
            request = search.request
            # A speculation replaces the last one of the same search.
            replaced = search.speculated is not None and search.dependents > 0
            if not self._has_room(wavefront, measured, int(replaced)):
                request.trace.refused += 1
                continue
            runs = [run for run in request.predicted_runs(search) if isinstance(run.node, Generation)]
            for run in runs:
                stages = 1 if search.due else 2
                trace = WorkItemTrace(run.id, "speculative", "engine", stages_ahead=stages, applied=[self.name])
                item = WorkItem(request, run, trace, search)
                if self.gain_s(item, measured) <= 0:
                    request.trace.declined += 1
                elif not (
                    self._has_room(wavefront, measured, replaced * len(runs))
                    and _hold(item, measured)
                    and _admit(item, measured)
                ):
                    # Nothing is known of an item that has not been added.
                    _let_go(item, measured)
                    request.trace.refused += 1
                else:
                    wavefront.speculate(item)

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        """Return the rest of the search (at most the generation) times the odds, less what a wrong one costs others:
        prefill, and slower decoding. 0 if the budget requires better odds."""
        if not self.odds or item.after is None:
            return math.inf
        odds, part = measured.odds(item.after), item.after.part
        part = ANY_PART if odds.right(part) is None else part
        right = odds.right(part)
        if right is not None and right < measured.spending.least_right:
            return 0.0
        gain_s = _gain_s(odds, part, measured, measured.expected_tokens(item)[1])
        return math.inf if gain_s is None else gain_s

    def across_s(self, search: WorkItem, measured: Measurements) -> float:
        graph = search.request.graph
        followed = [id for id in graph.next_nodes(search.run.id) if isinstance(graph.nodes[id], Generation)]
        if not self.across or not followed:
            return 0.0
        if not self.odds:
            return math.inf
        odds = measured.odds(search)
        parts = [part for part in search.parts if odds.right(part) is not None] or [ANY_PART]
        answer_tokens = max(measured.tokens.of((graph.name, id))[1] for id in followed)
        gains_s = [_gain_s(odds, part, measured, answer_tokens) for part in parts]
        known_s = [gain_s for gain_s in gains_s if gain_s is not None]
        return max(0.0, *known_s) if known_s else math.inf

    def _has_room(self, wavefront: Wavefront, measured: Measurements, replaced: int) -> bool:
        running = wavefront.count("engine") - replaced
        pending = measured.load.pending + wavefront.unsent
        return running < self.bound and wavefront.has_room(running) and pending < measured.load.max_prefill_bs

    def _concerns(self, item: WorkItem) -> bool:
        if item.stage is None or not (item.due or self.across):
            return False
        return not (self.recalled_only and item.stage.number)


def _gain_s(odds: SpeculationGain, part: int, measured: Measurements, answer_tokens: float) -> float | None:
    prefill_s, generation_s = measured.prefill_s, measured.generation_s.value
    if prefill_s is None:
        return None
    right, left_s = odds.right(part), odds.left_s(part)
    gain_s = odds.gain_s(part, prefill_s, max(prefill_s, generation_s or 0.0))
    if right is None or gain_s is None or left_s is None:
        return None
    others = measured.wavefront.count("engine", speculative=False)
    # The mean was measured with other prefills in the same iterations.
    alone_s = prefill_s / (1 + measured.load.pending)
    # A wrong one is decoded until the search has ended.
    decoding, token_s = measured.decoding, measured.decoding.token_s
    tokens = answer_tokens if not token_s else min(answer_tokens, left_s / token_s)
    return gain_s - (1 - right) * others * (alone_s + tokens * decoding.added_s)


def _hold(item: WorkItem, measured: Measurements) -> bool:
    tokens = round(sum(measured.expected_tokens(item)))
    if not measured.spending.hold_generation(tokens):
        return False
    item.held = tokens
    item.at_end.append(partial(measured.settle, item))
    return True


def _let_go(item: WorkItem, measured: Measurements) -> None:
    item.ended = True
    measured.settle(item)


def _admit(item: WorkItem, measured: Measurements) -> bool:
    item.admission = admission = measured.load.admit()
    if admission is not None:
        item.at_end.append(admission.end)
    return admission is not None


def _distance(item: WorkItem, measured: Measurements) -> float:
    distances = item.stage.distances[0] if item.stage is not None else ()
    mean = sum(map(float, distances)) / max(1, len(distances))
    return -mean if getattr(measured.search, "similarity", False) else mean


class SpeculateRetrieval:
    """Speculative searches, within the budget of searches (`Spending`).

    A query independent of what still runs is known, and searched for at once. The query after a generation is predicted
    from its text so far. If the final query differs, the search is cancelled; in a shared index its results order the
    due search's clusters.

    - `known`: False to predict only
    - `bound`: most searches (paper: 32)
    - `every`: tokens between predictions; queries that have changed least go first
    - `embeddings`: of predicted queries at the same time
    - `generations`: speculated on across the searches (None: only a search's own gain counts)
    """

    name = "speculate_retrieval"

    def __init__(
        self,
        bound: int = 32,
        *,
        every: int = 16,
        embeddings: int = 1,
        generations: SpeculateGeneration | None = None,
        known: bool = True,
    ) -> None:
        for name, value in (("bound", bound), ("every", every), ("embeddings", embeddings)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.bound = bound
        self.every = every
        self.embeddings = embeddings
        self.generations = generations
        self.known = known

    def reads_tokens(self, graph: CompiledGraph, node: NodeId, measured: Measurements, /) -> bool:
        """Return whether a search can come next, after nothing but pure steps."""
        waiting, seen = list(graph.next_nodes(node)), {node}
        while waiting and measured.cuts:
            following = graph.nodes[waiting.pop()]
            if isinstance(following, Retrieval):
                return True
            if isinstance(following, Step) and following.pure and following.id not in seen:
                seen.add(following.id)
                waiting += graph.next_nodes(following.id)
        return False

    def apply(self, wavefront: Wavefront, measured: Measurements, /) -> None:
        if self.known:
            self._search_known(wavefront, measured)
        written = [item for item in wavefront.progressed("engine") if self._concerns(item)]
        room = min(self.embeddings - measured.speculative_embeddings, self.bound - wavefront.count("search"))
        for generation in sorted(written, key=lambda item: item.drift):
            request = generation.request
            if room <= 0:
                request.trace.refused += 1
                continue
            generation.checked_tokens = generation.tokens
            generation.checks += 1
            for run in request.predicted_runs(generation):
                if not isinstance(run.node, Retrieval):
                    continue
                trace = WorkItemTrace(run.id, "speculative", "search", stages_ahead=1, applied=[self.name])
                item = WorkItem(request, run, trace, generation, checks=generation.checks)
                if self.gain_s(item, measured) <= 0:
                    request.trace.declined += 1
                elif room <= 0 or not measured.spending.searches.has_room(1):
                    request.trace.refused += 1
                else:
                    room -= 1
                    _begin_search(item, wavefront, measured)

    def gain_s(self, item: WorkItem, measured: Measurements, /) -> float:
        """Return, by the odds, what a final query saves (search and embedding, at most the rest of the generation) or
        else ordered clusters, plus the gain of a generation on the results."""
        search_s, embed_s = measured.search_s.value, measured.embed_s.value or 0.0
        if item.after is None or search_s is None:
            return math.inf
        odds, number = measured.odds(item.after), item.after.part
        if odds.right(number) is None:
            number = ANY_PART
        right, gain_s = odds.right(number), odds.gain_s(number, embed_s, embed_s + search_s)
        if right is None or gain_s is None:
            return math.inf
        across_s = 0.0 if self.generations is None else self.generations.across_s(item, measured)
        return across_s + gain_s + (1 - right) * (max(measured.hint, 0.0) * search_s - embed_s)

    def _search_known(self, wavefront: Wavefront, measured: Measurements) -> None:
        started = {item.request: item for item in wavefront.new if _leads_to_search(item)}
        for request, item in started.items():
            for run in request.known_runs(item):
                trace = WorkItemTrace(run.id, "speculative", "search", stages_ahead=1, applied=[self.name])
                known = WorkItem(request, run, trace, item, known=True)
                right = measured.odds_of(request.graph, run.id, KNOWN).right(ANY_PART)
                if right is not None and right < _LEAST_KNOWN:
                    request.trace.declined += 1
                elif wavefront.count("search") >= self.bound or not measured.spending.searches.has_room(0):
                    request.trace.refused += 1
                else:
                    _begin_search(known, wavefront, measured)

    def _concerns(self, item: WorkItem) -> bool:
        return item.tokens - item.checked_tokens >= self.every and bool(item.request.graph.next_nodes(item.run.id))


# Known queries are not needed where a condition leads elsewhere.
_LEAST_KNOWN = 0.5


def _leads_to_search(item: WorkItem) -> bool:
    return item.due and not item.ended and item.worker != "step" and _may_search_again(item)


def _begin_search(item: WorkItem, wavefront: Wavefront, measured: Measurements) -> None:
    allowance = measured.spending.searches
    held = 0 if item.known else 1
    allowance.held += held

    def ended() -> None:
        allowance.held -= held
        allowance.wasted += item.trace.started_s is not None and item.trace.outcome != "used"

    item.at_end.append(ended)
    wavefront.speculate(item)


def all_transformations(warm_up: WarmUp[NodeQuestion] | None = None) -> tuple[Transformation, ...]:
    """Return all, first those that add work items."""
    warming = () if warm_up is None else (WarmSystemPrompt(warm_up),)
    generations = SpeculateGeneration()
    return (
        generations,
        SpeculateRetrieval(generations=generations),
        Split(),
        Reorder(),
        OrderDocuments(),
        *warming,
    )
