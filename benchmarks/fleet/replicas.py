"""Fleets of simulated replicas, by the policy that chooses one for a request."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from math import ceil, inf
from statistics import fmean
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ragorder import Document, Orderer, Ordering
from ragorder.benchmarks.common.served import cached_share
from ragorder.eval.data.trace import Trace, TraceRequest, trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column, ratio
from ragorder.eval.report.tables import Entry, Tone
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState
from ragorder.topic import Topics

BLOCK_SIZE = 16
KEPT_TOKENS = 32
"""Of an answer, those that stay in the cache: all but its last."""
_TOP_K = 5
_SECRET = "the same in every run"  # noqa: S105
# Points of a replica: its share of the keys deviates by a tenth with 100, by a thirtieth with these.
_POINTS = 1000
_BOUNDED = ("topic, bound", "topic, table")
_ENOUGH = 90
_MOST_LOAD = 1.5


def make_engine(capacity_tokens: int) -> SimEngine:
    return SimEngine(block_size=BLOCK_SIZE, capacity_tokens=capacity_tokens, like="vllm-0.32")


def make_orderer(capacity_tokens: int, prompts: NumberedPrompts) -> Orderer:
    return Orderer(
        capacity_tokens=capacity_tokens,
        block_size=BLOCK_SIZE,
        prefix_tokens=prompts.prefix_tokens,
        suffix_tokens=prompts.question_tokens + KEPT_TOKENS,
        strict=True,
    )


class Started:
    """A request in flight. `exact`: its cached tokens are predicted to the block."""

    def __init__(self, ordering: Ordering[Document], handle: int, cached_tokens: int, prompt_tokens: int) -> None:
        self.ordering = ordering
        self.handle = handle
        self.cached_tokens = cached_tokens
        self.prompt_tokens = prompt_tokens
        self.exact = abs(cached_tokens - ordering.cached_tokens) < BLOCK_SIZE


class SimulatedReplica:
    """One cache of a fleet; `prompts` are those of all replicas."""

    def __init__(self, capacity_tokens: int, prompts: NumberedPrompts) -> None:
        self.in_flight = 0
        self._prompts = prompts
        self._engine = make_engine(capacity_tokens)
        self._orderer = make_orderer(capacity_tokens, prompts)

    def predict(self, documents: Sequence[Document]) -> CachedLengths:
        cached_tokens, documents_end = self._orderer.predict_cached_tokens(documents)
        return CachedLengths(cached_tokens, documents_end + self._prompts.question_tokens - cached_tokens)

    def start(self, request: TraceRequest, number: int) -> Started:
        ordering = self._orderer.order(request.documents)
        prompt = self._prompts.token_ids(number, request, ordering.documents)
        done, handle = self._engine.admit(prompt, KEPT_TOKENS)
        self.in_flight += 1
        return Started(ordering, handle, done.cached_tokens, done.prompt_tokens)

    def end(self, started: Started) -> None:
        self._engine.finish(started.handle)
        self.in_flight -= 1
        started.ordering.confirm(started.cached_tokens, started.prompt_tokens + KEPT_TOKENS + 1)


Fleet = Mapping[int, SimulatedReplica]


class Ring:
    """Replicas on a ring of hashes, each at many points; a key belongs to the one at the next point."""

    def __init__(self, replicas: Iterable[int]) -> None:
        points = sorted((_hash(f"{replica}:{point}"), replica) for replica in replicas for point in range(_POINTS))
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def owners(self, key: str) -> Iterator[int]:
        """All replicas, each once."""
        seen = set()
        start = bisect(self._places, _hash(key))
        for step in range(len(self._replicas)):
            replica = self._replicas[(start + step) % len(self._replicas)]
            if replica not in seen:
                seen.add(replica)
                yield replica


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


class ReplicasCell(SuiteCell):
    """`replicas` with `capacity_tokens` each serve a workload or the questions of a corpus, `in_flight` at a time each.

    A topic has at most a `share` of the requests. With `changes` a replica is added after a third of the requests, and
    another removed after two thirds.
    """

    replicas: int = Field(16, ge=2)
    workload: str | None = None
    corpus: str | None = None
    capacity_tokens: int = Field(16_384, ge=1)
    in_flight: int = Field(4, ge=1)
    requests: int = Field(2400, ge=1)
    top_k: int | None = Field(None, ge=1)
    share: float = Field(1 / 32, gt=0, le=1)
    changes: bool = False

    @model_validator(mode="after")
    def _one_trace(self) -> Self:
        if (self.workload is None) == (self.corpus is None):
            raise ValueError("give either workload or corpus")
        return self


class Router(ABC):
    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        self.cell = cell
        self.rng = random.Random(seed)

    def changed(self, replicas: Fleet) -> float | None:
        """Replicas were added or removed; the share of the topics so far that have another owner, if there are any."""
        return None

    @abstractmethod
    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int: ...


class Random(Router):
    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int:
        return self.rng.choice(list(replicas))


class InTurn(Router):
    turn = 0

    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int:
        self.turn += 1
        return list(replicas)[self.turn % len(replicas)]


class LeastBusy(Router):
    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int:
        return min(replicas, key=lambda number: (replicas[number].in_flight, self.rng.random()))


class TopicOwner(Router):
    """The owner of the topic, however busy."""

    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        super().__init__(cell, seed)
        self._topics = Topics(_SECRET, share=cell.share)
        self._seen: dict[str, None] = {}
        self._ring = Ring([])

    @property
    def topics(self) -> int:
        """Seen so far."""
        return len(self._seen)

    def changed(self, replicas: Fleet) -> float | None:
        former, self._ring = self._ring, Ring(replicas)
        moved = sum(next(former.owners(topic)) != next(self._ring.owners(topic)) for topic in self._seen)
        return moved / len(self._seen) if self._seen else None

    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int:
        topic = self._topics.of(document.key for document in documents) or ""
        self._seen[topic] = None
        return self.owner(topic, replicas)

    def owner(self, topic: str, replicas: Fleet) -> int:
        return next(self._ring.owners(topic))


class BoundedOwner(TopicOwner):
    """The first owner with at most `bound` times the mean in flight (Mirrokni, Thorup and Zadimoghaddam 2018)."""

    def __init__(self, cell: ReplicasCell, seed: int, bound: float) -> None:
        super().__init__(cell, seed)
        self.bound = bound

    def owner(self, topic: str, replicas: Fleet) -> int:
        in_flight = 1 + sum(replica.in_flight for replica in replicas.values())
        most = ceil(self.bound * in_flight / len(replicas))
        return next(number for number in self._ring.owners(topic) if replicas[number].in_flight < most)


class TableOwner(TopicOwner):
    """The replica that was least busy when the topic was new; again once it has `bound` times the mean in flight."""

    def __init__(self, cell: ReplicasCell, seed: int, bound: float = inf) -> None:
        super().__init__(cell, seed)
        self.bound = bound
        self._owners: dict[str, int] = {}

    def changed(self, replicas: Fleet) -> float | None:
        topics = len(self._owners)
        self._owners = {topic: owner for topic, owner in self._owners.items() if owner in replicas}
        return 1 - len(self._owners) / topics if topics else None

    def owner(self, topic: str, replicas: Fleet) -> int:
        in_flight = 1 + sum(replica.in_flight for replica in replicas.values())
        owner = self._owners.get(topic)
        if owner is None or replicas[owner].in_flight >= self.bound * in_flight / len(replicas):
            owner = min(replicas, key=lambda number: (replicas[number].in_flight, self.rng.random()))
            self._owners[topic] = owner
        return owner


class Best(Router):
    """The best of all, by predicted cached tokens and load."""

    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        super().__init__(cell, seed)
        self._best: BestReplica[int] = BestReplica()

    def choose(self, documents: Sequence[Document], replicas: Fleet) -> int:
        return self._best.choose(
            {number: ReplicaState(each.predict(documents), each.in_flight) for number, each in replicas.items()}
        )


ROUTERS: Mapping[str, Callable[[ReplicasCell, int], Router]] = {
    "random": Random,
    "in turn": InTurn,
    "least busy": LeastBusy,
    "topic": TopicOwner,
    "topic, bound 2": partial(BoundedOwner, bound=2.0),
    "topic, bound 1.5": partial(BoundedOwner, bound=1.5),
    "topic, bound 1.25": partial(BoundedOwner, bound=1.25),
    "topic, table": TableOwner,
    "topic, table, bound 2": partial(TableOwner, bound=2.0),
    "best": Best,
}


def load(run: Record) -> float:
    """The most tokens computed by a replica that was always there, over their mean."""
    columns = (run.rows[name] for name in ("prompt_tokens", "cached_tokens", "always"))
    computed: list[int] = [prompt - cached for prompt, cached, always in zip(*columns, strict=True) if always]
    return float(max(computed) * len(computed) / max(1, sum(computed)))


def _goal(row: Row, reached: bool) -> Tone:
    """The goals are those of topics with bounded load."""
    if not row.policy.startswith(_BOUNDED):
        return ""
    return "good" if reached else "bad"


def _load(row: Row) -> Entry:
    mean = fmean(row.values(load))
    return Entry(format_number(mean, 2), tone=_goal(row, mean <= _MOST_LOAD))


def _moved(row: Row) -> str:
    moved = zip(*(run.facts.get("moved") or () for run in row.runs), strict=True)
    return ", ".join(format_number(100 * fmean(shares)) for shares in moved) or "–"


def _changed(block: Block) -> bool:
    return any(run.facts.get("moved") for run in block.runs)


def _columns(block: Block) -> list[Column]:
    columns = [
        policy_column(),
        figure("cached, %", cached_share, scale=100, spread=True),
        ratio("of best, %", cached_share, "best", 1, scale=100, tone=lambda row, share: _goal(row, share >= _ENOUGH)),
        Column("largest / mean work", _load),
        figure("most in flight / mean", "in_flight", 2),
        figure("exact, %", "exact", scale=100),
    ]
    return [*columns, Column("topics moved, %", _moved)] if _changed(block) else columns


def _note(block: Block) -> str:
    requests = sum(block.first.rows["requests"])
    note = f"Mean of {block.seeds} seeds (in brackets their range), {requests:,} requests each after the warm-up."
    return f"{note} Topics moved: when a replica is added, and when one is removed." if _changed(block) else note


class Replicas(Experiment):
    """`rows` have an entry for each replica that served at all: `requests`, `prompt_tokens` and `cached_tokens` after
    the warm-up, and whether it was `always` there. Facts: the share of `exact` predictions (to the block), the
    `topics`, the shares of them that `moved`, in order of the changes, and the largest number `in_flight` over the
    mean."""

    kind = "replicas"
    cell = ReplicasCell
    columns = ("requests", "prompt_tokens", "cached_tokens", "always")
    facts = ("exact", "in_flight")
    policies: ClassVar[Any] = tuple(ROUTERS)
    simulated = True
    tables: ClassVar[Any] = [
        TableForm(
            lambda block: f"{block.cell.workload or block.cell.corpus}: {block.cell.replicas} replicas", _columns, _note
        )
    ]

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ReplicasCell = job.cell
        requests = _trace(job).requests
        warmup = min(job.suite.warmup, len(requests) // 4)
        for policy in job.policies:
            found = serve(requests, cell, policy, job.seed, warmup, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, **found}


def _trace(job: Job) -> Trace:
    cell: ReplicasCell = job.cell
    if job.corpus is not None:
        top_k = cell.top_k or _TOP_K
        return trace_of_corpus(job.corpus, top_k=top_k, order="random", seed=job.seed, limit=job.requests)
    assert cell.workload is not None
    drawn = make_workload(cell.workload, job.seed, top_k=cell.top_k, requests=job.requests)
    return trace_of_workload(drawn, job.requests)


def serve(
    requests: Sequence[TraceRequest],
    cell: ReplicasCell,
    policy: str,
    seed: int,
    warmup: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return rows and facts of a record; requests end after a random number of others, so nothing depends on time."""
    prompts, rng = NumberedPrompts(), random.Random(seed)
    replicas = {number: SimulatedReplica(cell.capacity_tokens, prompts) for number in range(cell.replicas)}
    router = ROUTERS[policy](cell, seed)
    router.changed(replicas)
    most = cell.in_flight * cell.replicas
    # By the place in the trace at which a request ends; of those that should have ended, the first does.
    running: list[tuple[float, int, SimulatedReplica, Started]] = []
    rows: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    moved: list[float] = []
    exact, busiest = 0, 0.0
    for place, request in enumerate(requests):
        if cell.changes and place in (len(requests) // 3, 2 * len(requests) // 3):
            if place < len(requests) // 2:
                replicas[cell.replicas] = SimulatedReplica(cell.capacity_tokens, prompts)
            else:
                del replicas[0]
            share = router.changed(replicas)
            if share is not None:
                moved.append(share)
        number = router.choose(request.documents, replicas)
        replica = replicas[number]
        started = replica.start(request, place)
        heappush(running, (place + rng.expovariate(1 / most), place, replica, started))
        if place >= warmup:
            exact += started.exact
            row = rows[number]
            for column, figure in enumerate((1, started.prompt_tokens, started.cached_tokens)):
                row[column] += figure
            in_flight = [each.in_flight for each in replicas.values()]
            busiest = max(busiest, max(in_flight) * len(in_flight) / sum(in_flight))
        if len(running) > most:
            _, _, ending, done = heappop(running)
            ending.end(done)
        advance()
    gone = {0, cell.replicas} if cell.changes else set()
    known = sorted({*rows, *range(cell.replicas)})
    return {
        "rows": {
            "requests": [rows[number][0] for number in known],
            "prompt_tokens": [rows[number][1] for number in known],
            "cached_tokens": [rows[number][2] for number in known],
            "always": [int(number not in gone) for number in known],
        },
        "facts": {
            "exact": exact / max(1, len(requests) - warmup),
            "in_flight": busiest,
            "topics": router.topics if isinstance(router, TopicOwner) else None,
            "moved": moved,
        },
    }
