"""Work items of all requests that can run now (HedraRAG 4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from ragorder.common.lru_cache import LRUCache
from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.load import Admission, EngineLoad
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.nodes import Generation, Node, NodeRun, Retrieval
from ragorder.pipelining.workflow.pricing import DecodingCost, NodeTokens, Spending
from ragorder.pipelining.workflow.result import Outcome, Worker, WorkflowTrace, WorkItemTrace

if TYPE_CHECKING:
    from ragorder.pipelining.workflow.searching import Found

ANY_PART = -1
KNOWN = "known"
"""Origin of a known search."""

_PARTS = 8
_MAX_CHECKS = 16


class Request(Protocol):
    graph: CompiledGraph
    scope: Hashable
    trace: WorkflowTrace

    @property
    def searches(self) -> int: ...

    def predicted_runs(self, item: WorkItem, /) -> list[NodeRun]: ...

    def known_runs(self, item: WorkItem, /) -> list[NodeRun]: ...

    def is_speculated(self, item: WorkItem, /) -> bool: ...

    def lengths(self, item: WorkItem, /) -> Callable[[], CachedLengths] | None: ...

    def start(self, item: WorkItem, /) -> None: ...


@dataclass(eq=False, slots=True)
class WorkItem:
    """One run of a node: due, or predicted from the progress of `after`.

    - `split`, `reorder`, `ordered`: set by transformations; `others`: on the engine when a generation became due
    - `released`: a speculation that has left the engine; `held`, `sent`: its tokens in the budget, and computed
    - of a search: the ids `speculated` on, `dependents` on the engine, whether its query is `known`
    - of a generation: `checks` for predictions, and the `drift` between the last two predicted queries
    """

    request: Request
    run: NodeRun
    trace: WorkItemTrace
    after: WorkItem | None = None
    split: bool = False
    reorder: bool = False
    ordered: bool = False
    streamed: bool = True
    admission: Admission | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list, repr=False)
    released: bool = False
    held: int | None = None
    sent: int | None = None
    known: bool = False
    others: int = 0
    ended: bool = False
    stage: Found | None = None
    text: list[str] = field(default_factory=list, repr=False)
    speculated: bytes | None = None
    dependents: int = 0
    tokens: int = 0
    checks: int = 0
    checked_tokens: int = 0
    drift: float = 0.0

    @property
    def due(self) -> bool:
        return self.after is None

    @property
    def node(self) -> Node:
        return self.run.node

    @property
    def worker(self) -> Worker:
        return self.trace.worker

    @property
    def part(self) -> int:
        """Progress: eighths of a search, from 1 (0: results of earlier searches), or `checks`."""
        part = 0
        if self.stage is not None and self.stage.number:
            part = 1 + _PARTS * self.stage.number // max(1, self.stage.stages)
        return self.parts[part]

    @property
    def parts(self) -> range:
        checks = min(self.checks, _MAX_CHECKS)
        if self.worker == "engine":
            return range(checks, checks + 1)
        return range((_PARTS + 2) * checks, (_PARTS + 2) * (checks + 1))


def worker_of(node: Node) -> Worker:
    return "engine" if isinstance(node, Generation) else "search" if isinstance(node, Retrieval) else "step"


class Wavefront:
    """Work items to start, and those whose progress may lead to others; `changed` asks for a scheduling cycle. While
    `limit` generations (None: any number) are on the engine, others wait in `queue`, the most cached first."""

    def __init__(self, changed: Callable[[], None], limit: int | None = None, window: int = 32) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_generations must be at least 1, or None, got {limit}")
        self.new: list[WorkItem] = []
        self.queue: CacheAwareQueue[WorkItem] = CacheAwareQueue(window)
        self._limit = limit
        self._changed = changed
        self._progressed: dict[WorkItem, None] = {}
        self._added: list[WorkItem] = []
        self._running: Counter[Worker] = Counter()
        self._speculative: Counter[Worker] = Counter()

    @property
    def starting(self) -> Iterator[WorkItem]:
        return chain(self.new, self._added)

    def add(self, item: WorkItem) -> None:
        self.new.append(item)
        item.others = self.on_engine
        self._running[item.worker] += 1
        self._changed()

    def progress(self, item: WorkItem) -> None:
        self._progressed[item] = None
        self._changed()

    def speculate(self, item: WorkItem) -> None:
        self._added.append(item)
        self._running[item.worker] += 1
        self._speculative[item.worker] += 1
        if item.after is not None:
            item.after.dependents += item.worker == "engine"

    def release(self, item: WorkItem) -> None:
        if not item.released and not item.ended:
            item.released = True
            self._leave(item)

    def end(self, item: WorkItem, outcome: Outcome, now_s: float) -> None:
        if not item.ended:
            item.ended = True
            item.trace.ended_s, item.trace.outcome = now_s, outcome
            for call in item.at_end:
                call()
            if not item.released:
                self._leave(item)

    def progressed(self, worker: Worker) -> Iterator[WorkItem]:
        return (item for item in self._progressed if item.worker == worker and not item.ended)

    def count(self, worker: Worker, *, speculative: bool | None = None) -> int:
        running, added = self._running[worker], self._speculative[worker]
        return running if speculative is None else added if speculative else running - added

    @property
    def on_engine(self) -> int:
        return self._running["engine"] - len(self.queue)

    @property
    def unsent(self) -> int:
        return len(self.queue) + sum(item.worker == "engine" and not item.ended for item in self.new)

    def take(self) -> list[WorkItem]:
        """Return the items to start now; of waiting generations one, whose effect the next choice sees."""
        items = [item for item in self.starting if not item.ended and not self._waits(item)]
        self.new, self._added = [], []
        self._progressed.clear()
        if self.next_may_start:
            items.insert(0, self.queue.take().item)
        return items

    @property
    def next_may_start(self) -> bool:
        return len(self.queue) > 0 and self.has_room(self.on_engine)

    def has_room(self, running: int) -> bool:
        return self._limit is None or running < self._limit

    def _leave(self, item: WorkItem) -> None:
        self._running[item.worker] -= 1
        self._speculative[item.worker] -= not item.due
        if item.after is not None:
            item.after.dependents -= item.worker == "engine"
        if item.worker == "engine" and self.queue:
            self._changed()

    def _waits(self, item: WorkItem) -> bool:
        if self._limit is None or item.worker != "engine" or not item.due or item.request.is_speculated(item):
            return False
        item.at_end.append(partial(self.queue.leave, self.queue.enter(item, item.request.lengths(item))))
        return True


_MAX_EDGES = 1024


class Measurements:
    """Measurements of all requests. `settled`, `settled_near`: share of a search after which nothing changed, without
    and with earlier searches. `cached_share`: of prompt tokens of generations with documents."""

    def __init__(self, load: EngineLoad, wavefront: Wavefront, search: Any, spending: Spending | None = None) -> None:
        self.load = load
        self.spending = Spending(None) if spending is None else spending
        self.decoding = DecodingCost()
        self.tokens = NodeTokens()
        self.wavefront = wavefront
        self.search = search
        self.speculative_embeddings = 0
        self.search_s = RunningMean(arithmetic_start=True)
        self.embed_s = RunningMean(arithmetic_start=True)
        self.generation_s = RunningMean(arithmetic_start=True)
        self.settled = RunningMean(arithmetic_start=True)
        self.settled_near = RunningMean(arithmetic_start=True)
        self.cached_share = RunningMean(arithmetic_start=True)
        self._odds: LRUCache[SpeculationGain] = LRUCache(_MAX_EDGES)

    @property
    def cuts(self) -> bool:
        return hasattr(self.search, "submit")

    @property
    def prefill_s(self) -> float | None:
        return self.load.prefill_s

    def generated(self, item: WorkItem, seconds: float, decoding_s: float | None) -> None:
        """Learn from a due generation without speculation; `decoding_s`: from its first token to its last."""
        self.generation_s.add(seconds)
        if decoding_s is not None and item.tokens > 1:
            running = (item.others + 1 + self.wavefront.on_engine) / 2
            self.decoding.add(running, decoding_s / (item.tokens - 1))

    def expected_tokens(self, item: WorkItem) -> tuple[float, float]:
        """Return the mean tokens of prompt and answer."""
        return self.tokens.of((item.request.graph.name, item.run.id))

    def pay(self, item: WorkItem) -> None:
        """Count the tokens of a due generation."""
        prompt_tokens, answer_tokens = item.trace.prompt_tokens or 0, item.trace.tokens
        self.tokens.add((item.request.graph.name, item.run.id), prompt_tokens, answer_tokens)
        self.spending.generated(prompt_tokens + answer_tokens)

    def settle(self, item: WorkItem) -> None:
        """Count a speculative generation's tokens once it has ended and left the engine."""
        unsent = item.trace.started_s is None
        if item.held is None or not item.ended or (item.sent is None and not unsent):
            return
        self.spending.free_generation(item.held)
        item.held = None
        if item.sent is not None and item.trace.outcome != "used":
            self.spending.waste_generation(item.sent)

    def odds(self, source: WorkItem) -> SpeculationGain:
        """Return the record of speculations on `source`, by its edge."""
        origin = None if source.after is None else source.after.run.id
        return self.odds_of(source.request.graph, source.run.id, origin)

    def odds_of(self, graph: CompiledGraph, *edge: Hashable) -> SpeculationGain:
        edge = (graph.name, *edge)
        odds = self._odds.get(edge)
        if odds is None:
            odds = SpeculationGain()
            self._odds.put(edge, odds)
        return odds

    @property
    def hint(self) -> float:
        if not self.cuts:
            return 0.0
        if self.settled.value is None or self.settled_near.value is None:
            return 0.1
        return self.settled.value - self.settled_near.value
