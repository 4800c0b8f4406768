"""Wavefront: the items of work of all requests that can run now (HedraRAG section 4.5)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ragorder.pipelining.load import Admission, EngineLoad
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths
from ragorder.pipelining.running_mean import RunningMean
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.join import NodeRun
from ragorder.pipelining.workflow.nodes import Generation, Node, Retrieval
from ragorder.pipelining.workflow.result import Outcome, Worker, WorkflowTrace, WorkItemTrace

if TYPE_CHECKING:
    from ragorder.pipelining.search.tiers import TierGains
    from ragorder.pipelining.staged import Stage

__all__ = ["ANY_PART", "EngineQueue", "Measurements", "Request", "Wavefront", "WorkItem", "worker_of"]

T = TypeVar("T")


class EngineQueue(Generic[T]):
    """Generations that wait while `limit` are on the engine (None: none waits).

    Next is the one with the largest cached / computed length of its prompt; one that `window` later ones have overtaken
    goes first. Raises ValueError for a limit below 1 or a negative window.
    """

    def __init__(self, limit: int | None = None, window: int = 32) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_generations must be at least 1, or None, got {limit}")
        self.limit = limit
        self._waiting: CacheAwareQueue[T] = CacheAwareQueue(window)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def largest_overtaking(self) -> int:
        """Later generations that have overtaken one, at most so far."""
        return self._waiting.largest_overtaking

    def has_room(self, running: int) -> bool:
        return self.limit is None or running < self.limit

    def enter(self, generation: T, lengths: Callable[[], CachedLengths] | None) -> Callable[[], object]:
        """Returns a function that takes it out again."""
        return partial(self._waiting.leave, self._waiting.enter(generation, lengths))

    def take(self) -> T:
        """Raises IndexError if none waits."""
        return self._waiting.take().item


ANY_PART = -1

_PARTS = 8
_MAX_CHECKS = 16


class Request(Protocol):
    """The request that a item belongs to."""

    graph: CompiledGraph
    scope: Hashable
    trace: WorkflowTrace

    @property
    def searches(self) -> int:
        """Those whose results its history holds."""

    def predicted_runs(self, item: WorkItem, /) -> list[NodeRun]:
        """Runs that would become due if the item ended with what it has so far. Those are left out that a item ahead
        of need does already, with the same inputs."""

    def is_speculated(self, item: WorkItem, /) -> bool:
        """Whether a speculation on a due generation is on the engine, or has answered it. One that has not been sent no
        longer will be."""

    def lengths(self, item: WorkItem, /) -> Callable[[], CachedLengths] | None:
        """Predicts the cached and computed tokens of a generation (None: not known)."""

    def start(self, item: WorkItem, /) -> None: ...


@dataclass(eq=False, slots=True)
class WorkItem:
    """Work on one run of a node, and what transformations have decided about it. A due item is waited for; another is
    ahead of need, `after` the one from whose progress it was predicted_runs.

    - `split`: searched in parts that other searches share; `reorder`: in an order taken from the request's history
    - `fast`: searched in the index's fast tier, where that holds its clusters; `prefetch`: these are loaded into it
    - `ordered`: documents in the cache's order
    - `admission`: its place among the pending requests of the engine, if it is a generation ahead of need; `released`:
      it has been answered, and the engine is done with it
    - `at_end` is called once the item has ended
    - progress of a search: its latest `stage`, and the ids that are `speculated` on, by `ahead` generations that are on
      the engine
    - progress of a generation: `text` and `tokens` so far, `checked_tokens` at up to here in so many `checks`, which a search
      that was predicted_runs from it keeps; `drift` between the last two queries that followed from it
    """

    request: Request
    run: NodeRun
    trace: WorkItemTrace
    after: WorkItem | None = None
    split: bool = False
    reorder: bool = False
    fast: bool = False
    prefetch: bool = False
    ordered: bool = False
    admission: Admission | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list, repr=False)
    released: bool = False
    ended: bool = False
    stage: Stage | None = None
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
        """How far it is: eighths of a search, from 1, and 0 for what earlier searches recall; checks at a generation. A
        search ahead of need has parts of its own for each look that it came from."""
        part = 0
        if self.stage is not None and self.stage.number:
            part = 1 + _PARTS * self.stage.number // max(1, self.stage.stages)
        return self.parts[part]

    @property
    def parts(self) -> range:
        """All that it will have, as far as known."""
        checks = min(self.checks, _MAX_CHECKS)
        if self.worker == "engine":
            return range(checks, checks + 1)
        return range((_PARTS + 2) * checks, (_PARTS + 2) * (checks + 1))


def worker_of(node: Node) -> Worker:
    return "engine" if isinstance(node, Generation) else "search" if isinstance(node, Retrieval) else "step"


class Wavefront:
    """What a scheduling cycle sees: items to start, and items whose progress may give rise to others.

    `changed` is called when a cycle is needed. A cycle costs by what has changed, not by what runs. Due generations
    wait in `queue`, where the engine has no room for them; all other due items start in the next cycle.
    """

    def __init__(self, changed: Callable[[], None], queue: EngineQueue[WorkItem] | None = None) -> None:
        self.new: list[WorkItem] = []
        self.queue: EngineQueue[WorkItem] = EngineQueue() if queue is None else queue
        self._changed = changed
        self._progressed: dict[WorkItem, None] = {}
        self._added: list[WorkItem] = []
        self._running: Counter[Worker] = Counter()
        self._speculative: Counter[Worker] = Counter()

    @property
    def starting(self) -> Iterator[WorkItem]:
        """`new` items, and those that this cycle adds ahead of need."""
        return chain(self.new, self._added)

    def add(self, item: WorkItem) -> None:
        """A item that has become due."""
        self.new.append(item)
        self._running[item.worker] += 1
        self._changed()

    def progress(self, item: WorkItem) -> None:
        self._progressed[item] = None
        self._changed()

    def speculate(self, item: WorkItem) -> None:
        """Start a item ahead of need, after those that are due."""
        self._added.append(item)
        self._running[item.worker] += 1
        self._speculative[item.worker] += 1
        if item.after is not None:
            item.after.dependents += item.worker == "engine"

    def release(self, item: WorkItem) -> None:
        """A item ahead of need has been answered: it waits for its use, and others may run in its place."""
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
        """Pieces with news since the last cycle: due ones, and searches ahead of need."""
        return (item for item in self._progressed if item.worker == worker and not item.ended)

    def count(self, worker: Worker, *, speculative: bool | None = None) -> int:
        """Pieces that run or are about to."""
        ahead = self._speculative[worker]
        return self._running[worker] if speculative is None else ahead if speculative else self._running[worker] - ahead

    @property
    def unsent(self) -> int:
        """Due generations that have not started."""
        return len(self.queue) + sum(item.worker == "engine" and not item.ended for item in self.new)

    def take(self) -> list[WorkItem]:
        """What this cycle starts: due items first. Of the generations that wait it is one, so that the next choice
        sees what this one puts into the cache."""
        items = [item for item in self.starting if not item.ended and not self._waits(item)]
        self.new, self._added = [], []
        self._progressed.clear()
        if self.next_may_start:
            items.insert(0, self.queue.take())
        return items

    @property
    def next_may_start(self) -> bool:
        """A due generation waits, and the engine has room: a cycle is needed once what was taken has started."""
        return len(self.queue) > 0 and self.queue.has_room(self._running["engine"] - len(self.queue))

    def _leave(self, item: WorkItem) -> None:
        self._running[item.worker] -= 1
        self._speculative[item.worker] -= not item.due
        if item.after is not None:
            item.after.dependents -= item.worker == "engine"
        if item.worker == "engine" and self.queue:
            self._changed()

    def _waits(self, item: WorkItem) -> bool:
        if self.queue.limit is None or item.worker != "engine" or not item.due or item.request.is_speculated(item):
            return False
        item.at_end.append(self.queue.enter(item, item.request.lengths(item)))
        return True


_MAX_EDGES = 1024


class Measurements:
    """Learnt from all requests; a mean is None before the first value.

    - `load` of the engine; `wavefront`: its counts
    - seconds of a whole `search_s`, `embed_s`, `generation_s`
    - `settled`, `settled_near`: share of a search after which its result did not change, without and with earlier
      searches of its request
    - `cached_share` of the prompt tokens of generations that show documents
    - `search`: as given to the server; `speculative_embeddings`: queries that are embedded ahead of need
    """

    def __init__(self, load: EngineLoad, wavefront: Wavefront, search: Any) -> None:
        self.load = load
        self.wavefront = wavefront
        self.search = search
        self.speculative_embeddings = 0
        self.search_s = RunningMean(arithmetic_start=True)
        self.embed_s = RunningMean(arithmetic_start=True)
        self.generation_s = RunningMean(arithmetic_start=True)
        self.settled = RunningMean(arithmetic_start=True)
        self.settled_near = RunningMean(arithmetic_start=True)
        self.cached_share = RunningMean(arithmetic_start=True)
        self._odds: OrderedDict[Hashable, SpeculationGain] = OrderedDict()

    @property
    def cuts(self) -> bool:
        """Whether searches advance in items that others share."""
        return hasattr(self.search, "submit")

    @property
    def tier_gains(self) -> TierGains | None:
        """Of a search by the index's fast tier (None: it has none)."""
        gains: TierGains | None = getattr(self.search, "tier_gains", None)
        return gains

    @property
    def prefill_s(self) -> float | None:
        return self.load.prefill_s

    def odds(self, source: WorkItem) -> SpeculationGain:
        """Of speculations on what a node has so far, due or ahead of need."""
        origin = None if source.after is None else source.after.run.id
        edge = (source.request.graph.name, source.run.id, origin)
        odds = self._odds.get(edge)
        if odds is None:
            odds = self._odds[edge] = SpeculationGain()
            if len(self._odds) > _MAX_EDGES:
                self._odds.popitem(last=False)
        else:
            self._odds.move_to_end(edge)
        return odds

    @property
    def hint(self) -> float:
        """Share of a search that its request's earlier ones save it, as far as known."""
        if self.settled.value is None or self.settled_near.value is None:
            return 0.1
        return self.settled.value - self.settled_near.value
