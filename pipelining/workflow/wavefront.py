"""Wavefront: the pieces of work of all requests that can run now (HedraRAG section 4.5)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ragorder.pipelining.load import Admission, EngineLoad
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.join import NodeRun
from ragorder.pipelining.workflow.nodes import Generation, Node, Retrieval
from ragorder.pipelining.workflow.result import Outcome, PieceTrace, Worker, WorkflowTrace
from ragorder.running_mean import RunningMean

if TYPE_CHECKING:
    from ragorder.pipelining.search.tiers import TierGains
    from ragorder.pipelining.staged import Stage

__all__ = ["ANY_PART", "EngineQueue", "Facts", "Piece", "Request", "Wavefront", "worker_of"]

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
_MOST_LOOKS = 16


class Request(Protocol):
    """The request that a piece belongs to."""

    graph: CompiledGraph
    scope: Hashable
    trace: WorkflowTrace

    @property
    def searches(self) -> int:
        """Those whose results its history holds."""

    def foreseen(self, piece: Piece, /) -> list[NodeRun]:
        """Runs that would become due if the piece ended with what it has so far. Those are left out that a piece ahead
        of need does already, with the same inputs."""

    def has_place(self, piece: Piece, /) -> bool:
        """Whether a speculation on a due generation is on the engine, or has answered it. One that has not been sent no
        longer will be."""

    def lengths(self, piece: Piece, /) -> Callable[[], CachedLengths] | None:
        """Predicts the cached and computed tokens of a generation (None: not known)."""

    def start(self, piece: Piece, /) -> None: ...


@dataclass(eq=False, slots=True)
class Piece:
    """Work on one run of a node, and what transformations have decided about it. A due piece is waited for; another is
    ahead of need, `after` the one from whose progress it was foreseen.

    - `split`: searched in parts that other searches share; `reorder`: in an order taken from the request's history
    - `fast`: searched in the index's fast tier, where that holds its clusters; `prefetch`: these are loaded into it
    - `ordered`: documents in the cache's order
    - `admission`: its place among the pending requests of the engine, if it is a generation ahead of need; `released`:
      it has been answered, and the engine is done with it
    - `at_end` is called once the piece has ended
    - progress of a search: its latest `stage`, and the ids that are `speculated` on, by `ahead` generations that are on
      the engine
    - progress of a generation: `text` and `tokens` so far, `looked` at up to here in so many `looks`, which a search
      that was foreseen from it keeps; `drift` between the last two queries that followed from it
    """

    request: Request
    run: NodeRun
    trace: PieceTrace
    after: Piece | None = None
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
    ahead: int = 0
    tokens: int = 0
    looks: int = 0
    looked: int = 0
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
        """How far it is: eighths of a search, from 1, and 0 for what earlier searches recall; looks at a generation. A
        search ahead of need has parts of its own for each look that it came from."""
        part = 0
        if self.stage is not None and self.stage.number:
            part = 1 + _PARTS * self.stage.number // max(1, self.stage.stages)
        return self.parts[part]

    @property
    def parts(self) -> range:
        """All that it will have, as far as known."""
        looks = min(self.looks, _MOST_LOOKS)
        if self.worker == "engine":
            return range(looks, looks + 1)
        return range((_PARTS + 2) * looks, (_PARTS + 2) * (looks + 1))


def worker_of(node: Node) -> Worker:
    return "engine" if isinstance(node, Generation) else "search" if isinstance(node, Retrieval) else "step"


class Wavefront:
    """What a scheduling cycle sees: pieces to start, and pieces whose progress may give rise to others.

    `changed` is called when a cycle is needed. A cycle costs by what has changed, not by what runs. Due generations
    wait in `queue`, where the engine has no room for them; all other due pieces start in the next cycle.
    """

    def __init__(self, changed: Callable[[], None], queue: EngineQueue[Piece] | None = None) -> None:
        self.new: list[Piece] = []
        self.queue: EngineQueue[Piece] = EngineQueue() if queue is None else queue
        self._changed = changed
        self._progressed: dict[Piece, None] = {}
        self._ahead: list[Piece] = []
        self._running: Counter[Worker] = Counter()
        self._speculative: Counter[Worker] = Counter()

    @property
    def starting(self) -> Iterator[Piece]:
        """`new` pieces, and those that this cycle adds ahead of need."""
        return chain(self.new, self._ahead)

    def add(self, piece: Piece) -> None:
        """A piece that has become due."""
        self.new.append(piece)
        self._running[piece.worker] += 1
        self._changed()

    def progress(self, piece: Piece) -> None:
        self._progressed[piece] = None
        self._changed()

    def speculate(self, piece: Piece) -> None:
        """Start a piece ahead of need, after those that are due."""
        self._ahead.append(piece)
        self._running[piece.worker] += 1
        self._speculative[piece.worker] += 1
        if piece.after is not None:
            piece.after.ahead += piece.worker == "engine"

    def release(self, piece: Piece) -> None:
        """A piece ahead of need has been answered: it waits for its use, and others may run in its place."""
        if not piece.released and not piece.ended:
            piece.released = True
            self._leave(piece)

    def end(self, piece: Piece, outcome: Outcome, now_s: float) -> None:
        if not piece.ended:
            piece.ended = True
            piece.trace.ended_s, piece.trace.outcome = now_s, outcome
            for call in piece.at_end:
                call()
            if not piece.released:
                self._leave(piece)

    def progressed(self, worker: Worker) -> Iterator[Piece]:
        """Pieces with news since the last cycle: due ones, and searches ahead of need."""
        return (piece for piece in self._progressed if piece.worker == worker and not piece.ended)

    def count(self, worker: Worker, *, speculative: bool | None = None) -> int:
        """Pieces that run or are about to."""
        ahead = self._speculative[worker]
        return self._running[worker] if speculative is None else ahead if speculative else self._running[worker] - ahead

    @property
    def unsent(self) -> int:
        """Due generations that have not started."""
        return len(self.queue) + sum(piece.worker == "engine" and not piece.ended for piece in self.new)

    def take(self) -> list[Piece]:
        """What this cycle starts: due pieces first. Of the generations that wait it is one, so that the next choice
        sees what this one puts into the cache."""
        pieces = [piece for piece in self.starting if not piece.ended and not self._waits(piece)]
        self.new, self._ahead = [], []
        self._progressed.clear()
        if self.next_may_start:
            pieces.insert(0, self.queue.take())
        return pieces

    @property
    def next_may_start(self) -> bool:
        """A due generation waits, and the engine has room: a cycle is needed once what was taken has started."""
        return len(self.queue) > 0 and self.queue.has_room(self._running["engine"] - len(self.queue))

    def _leave(self, piece: Piece) -> None:
        self._running[piece.worker] -= 1
        self._speculative[piece.worker] -= not piece.due
        if piece.after is not None:
            piece.after.ahead -= piece.worker == "engine"
        if piece.worker == "engine" and self.queue:
            self._changed()

    def _waits(self, piece: Piece) -> bool:
        if self.queue.limit is None or piece.worker != "engine" or not piece.due or piece.request.has_place(piece):
            return False
        piece.at_end.append(self.queue.enter(piece, piece.request.lengths(piece)))
        return True


_MAX_EDGES = 1024


class Facts:
    """Learnt from all requests; a mean is None before the first value.

    - `load` of the engine; `wavefront`: its counts
    - seconds of a whole `search_s`, `embed_s`, `generation_s`
    - `settled`, `settled_near`: share of a search after which its result did not change, without and with earlier
      searches of its request
    - `cached_share` of the prompt tokens of generations that show documents
    - `search`: as given to the server; `embedding_ahead`: queries that are embedded ahead of need
    """

    def __init__(self, load: EngineLoad, wavefront: Wavefront, search: Any) -> None:
        self.load = load
        self.wavefront = wavefront
        self.search = search
        self.embedding_ahead = 0
        self.search_s = RunningMean(arithmetic_start=True)
        self.embed_s = RunningMean(arithmetic_start=True)
        self.generation_s = RunningMean(arithmetic_start=True)
        self.settled = RunningMean(arithmetic_start=True)
        self.settled_near = RunningMean(arithmetic_start=True)
        self.cached_share = RunningMean(arithmetic_start=True)
        self._odds: OrderedDict[Hashable, SpeculationGain] = OrderedDict()

    @property
    def cuts(self) -> bool:
        """Whether searches advance in pieces that others share."""
        return hasattr(self.search, "submit")

    @property
    def tier_gains(self) -> TierGains | None:
        """Of a search by the index's fast tier (None: it has none)."""
        gains: TierGains | None = getattr(self.search, "tier_gains", None)
        return gains

    @property
    def prefill_s(self) -> float | None:
        return self.load.prefill_s

    def odds(self, source: Piece) -> SpeculationGain:
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
