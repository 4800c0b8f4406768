"""A run: one policy on one engine over one trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ragorder import Lengths
from ragorder.document import Document
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.trace import Trace, TraceRequest
from ragorder.eval.engines.base import Cache, EngineCompletion
from ragorder.eval.engines.prompts import BuiltPrompts, Prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.measures import Column, Columns, Measures, thread_times_us
from ragorder.eval.running.policies import Policy
from ragorder.orderer import Orderer
from ragorder.ordering import Moves, Ordering
from ragorder.prompt import PromptBuilder

_POINTS = 60


@dataclass(slots=True)
class Timeline:
    """Samples taken when `request` was sent: tokens in the cache, tokens evicted so far, and nodes of the policy's tree
    (None without one)."""

    request: list[int] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)
    evicted_tokens: list[int] = field(default_factory=list)
    tree_nodes: list[int | None] = field(default_factory=list)
    _engine: SimEngine | None = None
    _every: int = 1

    @classmethod
    def of(cls, engine: Cache, requests: int) -> Self | None:
        """At most 60 samples; None for an engine whose block table cannot be read."""
        if not isinstance(engine, SimEngine):
            return None
        return cls(_engine=engine, _every=max(1, -(-requests // _POINTS)))

    def sent(self, row: int, tree_nodes: int | None) -> None:
        engine = self._engine
        if row % self._every or engine is None:
            return
        self.request.append(row)
        self.held_tokens.append(engine.cached_blocks * engine.block_size)
        self.evicted_tokens.append(engine.evicted_blocks * engine.block_size)
        self.tree_nodes.append(tree_nodes)

    def as_json(self) -> dict[str, list[int | None]]:
        return {name: getattr(self, name) for name in ("request", "held_tokens", "evicted_tokens", "tree_nodes")}


@dataclass(frozen=True, slots=True)
class Sent:
    """A request in flight."""

    row: int
    number: int
    ordering: Ordering[Document]


@dataclass(frozen=True, slots=True)
class Served:
    """One served request; the first `cached_documents` of its documents were cached."""

    number: int
    documents: list[Document]
    cached_documents: int
    completion: EngineCompletion


class Run:
    """A driver calls `send`, has the engine serve the request, and calls `end` or `fail`. `keep` keeps the requests in
    `served`; `text_builder` builds and times the text where the engine takes token ids only; `timeline` samples the
    cache."""

    def __init__(
        self,
        trace: Trace,
        policy_name: str,
        policy: Policy,
        engine: Cache,
        prompts: Prompts,
        *,
        seed: int = 0,
        waiting: int = 0,
        batch: bool = False,
        max_wait: int | None = None,
        load: dict[str, Any] | None = None,
        keep: bool = False,
        text_builder: PromptBuilder | None = None,
        timeline: bool = False,
    ) -> None:
        self.trace = trace
        self.policy_name = policy_name
        self.engine = engine
        self.seed = seed
        self.waiting = waiting
        self.batch = batch
        self.max_wait = max_wait
        self.load = load
        self.in_flight = 0
        self.served: list[Served] = []
        self._policy = policy
        self._prompts = prompts
        self._keep = keep
        self._text_builder = text_builder
        self.timeline = Timeline.of(engine, len(trace.requests)) if timeline else None
        self._builds = text_builder is not None or isinstance(prompts, BuiltPrompts)
        # A policy that orders in a process of its own says what it took there.
        self._clock_ns: Callable[[], int] = getattr(policy, "clock_ns", time.thread_time_ns)
        self._most_in_flight = 0
        self._first_s = self._last_s = 0.0
        self._orderings = self._plan() if batch else self._one_by_one()
        self._measures = Measures(len(trace.requests), tree_nodes=self._tree_nodes)
        self._sent = 0

    @property
    def remaining(self) -> int:
        return len(self.trace.requests) - self._sent

    def send(self) -> Sent:
        """Order the next request's documents and count it as in flight."""
        number, ordering, order_ns = next(self._orderings)
        sent = Sent(self._sent, number, ordering)
        self._sent += 1
        self.in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self.in_flight)
        self._measures.number[sent.row] = number
        self._measures.order_ns[sent.row] = order_ns
        self._measures.sent(sent.row, self.in_flight)
        if self.timeline is not None:
            self.timeline.sent(sent.row, self._tree_nodes())
        return sent

    def token_ids(self, sent: Sent) -> Sequence[int]:
        request, documents, builder = self.trace.requests[sent.number], sent.ordering.documents, self._text_builder
        start = time.thread_time_ns()
        if builder is not None:
            builder.build(request.question, documents)
        else:
            token_ids = self._prompts.token_ids(sent.number, request, documents)
        self._measures.build_ns[sent.row] = time.thread_time_ns() - start
        return token_ids if builder is None else self._prompts.token_ids(sent.number, request, documents)

    def end(self, sent: Sent, completion: EngineCompletion) -> None:
        measures, row, ordering = self._measures, sent.row, sent.ordering
        self._finish(row, lambda: ordering.confirm(completion.cached_tokens))
        measures.served(row)
        cached_documents = self._cached_documents(ordering.documents, completion.cached_tokens)
        measures.prompt_tokens[row] = completion.prompt_tokens
        measures.cached_tokens[row] = completion.cached_tokens
        measures.predicted_tokens[row] = ordering.cached_tokens
        moves = Moves.of(ordering.permutation, cached_documents)
        measures.displacement[row] = moves.places
        measures.reordered[row], measures.reordered_cold[row] = moves.reordered, moves.cold
        measures.best_moved[row] = moves.best_moved
        measures.moved_share[row] = _moved_share(ordering.permutation)
        measures.ttft_s[row] = math.nan if completion.ttft_s is None else completion.ttft_s
        measures.total_s[row] = math.nan if completion.total_s is None else completion.total_s
        measures.tbt_s[row] = math.nan if completion.tbt_s is None else completion.tbt_s
        self._last_s = time.perf_counter()
        measures.cached_documents[row] = cached_documents
        if self._keep:
            self.served.append(Served(sent.number, ordering.documents, cached_documents, completion))

    def fail(self, sent: Sent) -> None:
        self._finish(sent.row, sent.ordering.discard)
        self._measures.failed(sent.row)

    def columns(self) -> Columns:
        measures = self._measures
        served = measures.rows()
        at = {measures.number[row]: row for row in served}

        def column(values: Sequence[float], digits: int | None = None) -> Column:
            rounded = values if digits is None else [round(value, digits) for value in values]
            rows = (at.get(number) for number in range(len(self.trace.requests)))
            return [None if row is None else rounded[row] for row in rows]

        timed = any(not math.isnan(measures.ttft_s[row]) for row in served)
        tbt_ms = [None if ms is None or math.isnan(ms) else ms for ms in column([1e3 * s for s in measures.tbt_s], 3)]
        predicts = isinstance(self._policy, Orderer)
        return Columns(
            prompt_tokens=column(measures.prompt_tokens),
            cached_tokens=column(measures.cached_tokens),
            cached_documents=column(measures.cached_documents),
            predicted_tokens=column(measures.predicted_tokens) if predicts else None,
            ttft_ms=column([seconds * 1e3 for seconds in measures.ttft_s], 3) if timed else None,
            tbt_ms=None if tbt_ms.count(None) == len(tbt_ms) else tbt_ms,
            order_us=column(thread_times_us(measures.order_ns, intervals=2), 1),
            build_us=column(thread_times_us(measures.build_ns), 1) if self._builds else None,
            displacement=column(measures.displacement, 4),
            moved_share=column(measures.moved_share, 4),
            reordered=column(measures.reordered),
            reordered_cold=column(measures.reordered_cold),
            best_moved=column(measures.best_moved),
        )

    def throughput(self, skip: int) -> dict[str, float] | None:
        """Return requests and tokens (prompts and answers) per second of the engine's time if served one at a time,
        the first `skip` left out, else of the time from the first request sent to the last answer; None without a
        clock."""
        measures = self._measures
        alone = self._most_in_flight == 1
        rows = measures.rows(skip if alone else 0)
        if not rows or any(math.isnan(measures.total_s[row]) for row in rows):
            return None
        seconds = sum(measures.total_s[row] for row in rows) if alone else self._last_s - self._first_s
        tokens = sum(measures.prompt_tokens[row] + self.engine.kept_output_tokens + 1 for row in rows)
        return {"requests_per_s": round(len(rows) / seconds, 4), "tokens_per_s": round(tokens / seconds, 2)}

    @property
    def failures(self) -> int:
        return self._measures.failures

    @property
    def fallbacks(self) -> int:
        return int(getattr(self._policy, "fallbacks", 0))

    @property
    def fallback_reason(self) -> str | None:
        return getattr(self._policy, "first_error", None)

    def fields(self, model: str | None, warmup: int = 0) -> dict[str, Any]:
        """Return the fields of this run's `RunRecord`, but for where it belongs."""
        engine = self.engine
        return {
            "engine": {
                "name": engine.name,
                "model": model,
                "block_size": engine.block_size,
                "capacity_tokens": engine.capacity_tokens,
                # How the simulated engine reuses blocks.
                **({"like": engine.like} if isinstance(engine, SimEngine) else {}),
            },
            "warmup": warmup,
            "failures": self.failures,
            "fallbacks": self.fallbacks,
            "fallback_reason": self.fallback_reason,
            "rows": asdict(self.columns()),
            "throughput": self.throughput(warmup),
            "timeline": None if self.timeline is None else self.timeline.as_json(),
            "load_average": load_average(),
        } | ({} if self.load is None else {"facts": {"tenths": self._measures.tenths()}})

    def _one_by_one(self) -> Iterator[tuple[int, Ordering[Document], int]]:
        requests, order = self.trace.requests, self._policy.order
        for number, request in enumerate(requests):
            waiting = [later.documents for later in requests[number + 1 : number + 1 + self.waiting]]
            suffix_tokens = self._suffix_tokens(request)
            self._first_s = self._first_s or time.perf_counter()
            start = self._clock_ns()
            ordering = order(request.documents, waiting=waiting, lengths=Lengths(suffix=suffix_tokens))
            yield number, ordering, self._clock_ns() - start

    def _plan(self) -> Iterator[tuple[int, Ordering[Document], int]]:
        requests = self.trace.requests
        suffix_tokens = max((self._suffix_tokens(request) for request in requests), default=0)
        documents = [request.documents for request in requests]
        self._first_s = time.perf_counter()
        start = self._clock_ns()
        wait = {} if self.max_wait is None else {"max_wait": self.max_wait}
        orderings = iter(self._policy.order_batch(documents, lengths=Lengths(suffix=suffix_tokens), **wait))
        planning = (self._clock_ns() - start) // max(1, len(requests))
        while True:
            start = self._clock_ns()
            ordering = next(orderings, None)
            if ordering is None:
                return
            yield ordering.index, ordering, self._clock_ns() - start + planning

    def _suffix_tokens(self, request: TraceRequest) -> int:
        return self._prompts.suffix_tokens(request) + self.engine.kept_output_tokens

    def _finish(self, row: int, finish: Callable[[], None]) -> None:
        self.in_flight -= 1
        start = self._clock_ns()
        finish()
        self._measures.order_ns[row] += self._clock_ns() - start

    def _cached_documents(self, documents: Sequence[Document], cached_tokens: int) -> int:
        end = self._prompts.prefix_tokens
        for place, document in enumerate(documents):
            end += self._prompts.document_tokens(document)
            if end - end % self.engine.block_size > cached_tokens:
                return place
        return len(documents)

    def _tree_nodes(self) -> int | None:
        return self._policy.tree_size if isinstance(self._policy, Orderer) else None


def _moved_share(permutation: Sequence[int]) -> float:
    return sum(place != rank for place, rank in enumerate(permutation)) / max(1, len(permutation))


MakeRun = Callable[[str, Cache, Prompts], Run]
"""A fresh run of the policy of this name on an engine, with the prompts that the engine takes."""
