"""Serves a trace under several policies, each on an engine of its own, and measures what the cache saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from ragorder.document import Document
from ragorder.eval.engines.base import Completion, Engine
from ragorder.eval.policies import Policy
from ragorder.eval.prompts import Prompts
from ragorder.eval.trace import Request, Trace
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering

__all__ = ["Run", "RunResult", "Served", "percentile", "run_interleaved"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one policy did on one trace. Times are None where the engine has no clock. `order_us` is thread CPU time of
    ordering and confirming one request; `prediction_within_block` the share of requests whose cached tokens the policy
    foretold to within one block (None: it foretells nothing)."""

    workload: str
    policy: str
    engine: str
    order: str
    seed: int
    top_k: int
    capacity_tokens: int | None
    waiting: int
    batch: bool
    requests: int
    prompt_tokens: int
    cached_tokens: int
    cached_ratio: float
    prefix_documents_mean: float
    displacement_mean: float
    prediction_within_block: float | None
    ttft_ms: dict[str, float] | None
    order_us: dict[str, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Served:
    """One served request: its place in the trace, its documents as they stood in the prompt, and how many of them, from
    the first, the engine had in its cache."""

    number: int
    documents: list[Document]
    cached_documents: int
    completion: Completion


class Run:
    """One policy on one engine over one trace, a request at a time."""

    def __init__(
        self,
        trace: Trace,
        policy_name: str,
        policy: Policy,
        engine: Engine,
        prompts: Prompts,
        *,
        seed: int = 0,
        waiting: int = 0,
        batch: bool = False,
    ) -> None:
        self.trace = trace
        self.policy_name = policy_name
        self.engine = engine
        self.seed = seed
        self.waiting = waiting
        self.batch = batch
        self._policy = policy
        self._prompts = prompts
        self._orderings = self._plan() if batch else self._one_by_one()
        self._in_flight: deque[tuple[int, Ordering[Document], int]] = deque()
        self._order_ns = [0] * len(trace.requests)
        self.served: list[Served] = []
        self._displacements: list[float] = []
        self._foretold: list[bool] = []

    def serve_next(self) -> None:
        """Order, build and serve the next request."""
        while len(self._in_flight) >= self.trace.in_flight:
            self._confirm_oldest()
        number, ordering = next(self._orderings)
        request = self.trace.requests[number]
        token_ids = self._prompts.token_ids(number, request, ordering.documents)
        completion = self.engine.generate(token_ids)
        self._in_flight.append((number, ordering, completion.cached_tokens))
        cached_documents = self._cached_documents(ordering.documents, completion.cached_tokens)
        self.served.append(Served(number, ordering.documents, cached_documents, completion))
        self._displacements.append(ordering.displacement)
        self._foretold.append(abs(completion.cached_tokens - ordering.cached_tokens) <= self.engine.block_size)

    def result(self) -> RunResult:
        """The figures of all requests served so far."""
        while self._in_flight:
            self._confirm_oldest()
        requests = self.trace.requests
        completions = [each.completion for each in self.served]
        prompt_tokens = sum(completion.prompt_tokens for completion in completions)
        cached_tokens = sum(completion.cached_tokens for completion in completions)
        order_us = [max(0, ns - 2 * _clock_ns()) / 1e3 for ns in self._order_ns]
        return RunResult(
            workload=self.trace.name,
            policy=self.policy_name,
            engine=self.engine.name,
            order=self.trace.order,
            seed=self.seed,
            top_k=max((len(request.documents) for request in requests), default=0),
            capacity_tokens=self.engine.capacity_tokens,
            waiting=self.waiting,
            batch=self.batch,
            requests=len(requests),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            cached_ratio=round(cached_tokens / max(1, prompt_tokens), 6),
            prefix_documents_mean=round(fmean([each.cached_documents for each in self.served] or [0]), 4),
            displacement_mean=round(fmean(self._displacements or [0]), 4),
            prediction_within_block=round(fmean(self._foretold or [1]), 4)
            if isinstance(self._policy, Orderer)
            else None,
            ttft_ms=_milliseconds([each.ttft_s for each in completions if each.ttft_s is not None]),
            order_us={"p50": round(percentile(order_us, 50), 2), "p99": round(percentile(order_us, 99), 2)},
        )

    def _one_by_one(self) -> Iterator[tuple[int, Ordering[Document]]]:
        requests, order = self.trace.requests, self._policy.order
        for number, request in enumerate(requests):
            waiting = [later.documents for later in requests[number + 1 : number + 1 + self.waiting]]
            suffix_tokens = self._suffix_tokens(request)
            start = time.thread_time_ns()
            ordering = order(request.documents, waiting=waiting, suffix_tokens=suffix_tokens)
            self._order_ns[number] += time.thread_time_ns() - start
            yield number, ordering

    def _plan(self) -> Iterator[tuple[int, Ordering[Document]]]:
        requests = self.trace.requests
        suffix_tokens = max((self._suffix_tokens(request) for request in requests), default=0)
        documents = [request.documents for request in requests]
        start = time.thread_time_ns()
        orderings = iter(self._policy.order_batch(documents, suffix_tokens=suffix_tokens))
        planning = (time.thread_time_ns() - start) // max(1, len(requests))
        while True:
            start = time.thread_time_ns()
            ordering = next(orderings, None)
            if ordering is None:
                return
            self._order_ns[ordering.index] += time.thread_time_ns() - start + planning
            yield ordering.index, ordering

    def _suffix_tokens(self, request: Request) -> int:
        return self._prompts.suffix_tokens(request) + self.engine.kept_output_tokens

    def _confirm_oldest(self) -> None:
        number, ordering, cached_tokens = self._in_flight.popleft()
        start = time.thread_time_ns()
        ordering.confirm(cached_tokens)
        self._order_ns[number] += time.thread_time_ns() - start

    def _cached_documents(self, documents: Sequence[Document], cached_tokens: int) -> int:
        end = self._prompts.prefix_tokens
        for place, document in enumerate(documents):
            end += self._prompts.document_tokens(document)
            if end - end % self.engine.block_size > cached_tokens:
                return place
        return len(documents)


def run_interleaved(runs: Sequence[Run], advance: Callable[[], None] = lambda: None) -> None:
    """Serve the runs' traces, of equal length, request by request in turn; who is first changes with each request."""
    for number in range(len(runs[0].trace.requests)):
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            run.serve_next()
            advance()


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of the values, interpolated linearly; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@lru_cache
def _clock_ns() -> int:
    """What reading the thread's clock twice takes of the thread's time."""
    readings = [time.thread_time_ns() for _ in range(2_001)]
    return sorted(after - before for before, after in pairwise(readings))[1_000]


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    milliseconds = [second * 1e3 for second in seconds]
    return {
        "p50": round(percentile(milliseconds, 50), 3),
        "p95": round(percentile(milliseconds, 95), 3),
        "mean": round(fmean(milliseconds), 3),
    }
