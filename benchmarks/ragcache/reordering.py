"""Cache-aware reordering of a queue under overload (RAGCache 5.2, Figure 21)."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import BeforeValidator, Field

from ragorder import Lengths
from ragorder.benchmarks.kernels.embedded.models import RandomPrompts
from ragorder.document import Document
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.trace import Trace, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.base import Cache, EngineCompletion, EngineError
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.engines.prompts import NumberedPrompts, Prompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.engines.torch import TorchEngine, TorchModel, lacks_torch
from ragorder.eval.report.declared import Block, TableForm
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.metrics import TBT_P50, TBT_P99, TTFT_MEAN, TTFT_P50, TTFT_P99, Metric
from ragorder.eval.report.tables import Entry
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.load import ServiceTimes, rotated
from ragorder.eval.running.policies import make_orderer
from ragorder.eval.running.record import Record, RunRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.ordering import Ordering
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter

if TYPE_CHECKING:
    from ragorder.eval.running.options import Options

_OWN_CAPACITY_TOKENS = 16_000
_OWN_BLOCK_SIZE = 32
_BASELINE = "fcfs"
_NOTE = (
    "Mean time to first token in the order of arrival, divided by the queue's: mean of the seeds (range). Below it: by "
    "how many later requests one was overtaken at most. +waiting: arranged for the next 8 waiting requests as well."
)
_TBT_NOTE = "Over answers of several tokens, each with its mean (RAGCache 5.4)."


@dataclass(frozen=True, slots=True)
class Discipline:
    """A reordering `window` (0: first come, first served); documents are arranged for the next `waiting` requests."""

    window: int
    waiting: int

    def within(self, window: int) -> Discipline:
        return Discipline(window if self.window else 0, self.waiting)


DISCIPLINES = {
    "fcfs": Discipline(0, 0),
    "fcfs+waiting": Discipline(0, 8),
    "reordered": Discipline(32, 0),
    "reordered+waiting": Discipline(32, 8),
}


class QueueOutcome:
    """Times of requests (None where unknown), tokens, and by how many later ones a request was overtaken at most."""

    def __init__(self, requests: int) -> None:
        self.ttft_s = [math.nan] * requests
        self.tbt_s: list[float | None] = [None] * requests
        self.prompt_tokens = [0] * requests
        self.cached_tokens = [0] * requests
        self.total_s = 0.0
        self.largest_overtaking = 0

    def served(self, number: int, completion: EngineCompletion, ttft_s: float) -> None:
        self.ttft_s[number] = ttft_s
        self.prompt_tokens[number] = completion.prompt_tokens
        self.cached_tokens[number] = completion.cached_tokens


class QueueServer(Protocol):
    @property
    def engine(self) -> dict[str, Any]:
        """Its description in the results."""

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        """Serve a trace that arrives at these seconds, on an empty cache."""


class _Queue:
    def __init__(self, trace: Trace, discipline: Discipline, engine: Cache, prompts: Prompts) -> None:
        lengths: dict[str, Any] = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens}
        self.requests = trace.requests
        self.waiting: CacheAwareQueue[int] = CacheAwareQueue(discipline.window)
        self._orderer = make_orderer("free", engine=engine, **lengths)
        self._foreseen = discipline.waiting
        self._prompts = prompts
        self._answer_tokens = engine.kept_output_tokens

    def lengths(self, number: int) -> Callable[[], CachedLengths]:
        request = self.requests[number]
        question_tokens = self._prompts.suffix_tokens(request)

        def lengths() -> CachedLengths:
            cached_tokens, end = self._orderer.predict_cached_tokens(request.documents)
            computed_tokens = end + question_tokens - cached_tokens
            return CachedLengths(cached_tokens, computed_tokens, self._prompts.prefix_tokens)

        return lengths

    def order(self, number: int) -> Ordering[Document]:
        request = self.requests[number]
        suffix_tokens = self._prompts.suffix_tokens(request) + self._answer_tokens
        waiting = [self.requests[other].documents for other in self.waiting.upcoming(self._foreseen)]
        return self._orderer.order(request.documents, waiting=waiting, lengths=Lengths(suffix=suffix_tokens))

    def token_ids(self, number: int, ordering: Ordering[Document]) -> Sequence[int]:
        return self._prompts.token_ids(number, self.requests[number], ordering.documents)


@dataclass(frozen=True, slots=True)
class VirtualQueues(QueueServer):
    """An engine in this process, on a virtual clock."""

    name: ClassVar[str]
    capacity_tokens: int | None
    max_in_flight: int
    output_tokens: int = 1
    times: ServiceTimes = field(default_factory=ServiceTimes)

    @property
    def engine(self) -> dict[str, Any]:
        return {"name": self.name, "capacity_tokens": self.capacity_tokens}


@dataclass(frozen=True, slots=True)
class SimulatedQueues(VirtualQueues):
    """The simulated engine: prefills one after another, decodes side by side."""

    name = "sim"

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        prompts = NumberedPrompts()
        engine = SimEngine(capacity_tokens=self.capacity_tokens, output_tokens=self.output_tokens)
        queue = _Queue(trace, discipline, engine, prompts)
        outcome = QueueOutcome(len(at_s))
        clock = prefill_ends = 0.0
        running: list[tuple[float, int, int, Ordering[Document], EngineCompletion]] = []
        sent: deque[tuple[int, Ordering[Document]]] = deque()
        arrived = 0
        while arrived < len(at_s) or running:
            if arrived < len(at_s) and (not running or at_s[arrived] <= running[0][0]):
                clock = at_s[arrived]
                queue.waiting.enter(arrived, queue.lengths(arrived))
                arrived += 1
            else:
                clock, _, handle, ordering, completion = heapq.heappop(running)
                engine.finish(handle)
                ordering.confirm(completion.cached_tokens)
            while queue.waiting and len(running) + len(sent) < self.max_in_flight:
                number = queue.waiting.take().item
                sent.append((number, queue.order(number)))
            while sent:
                number, ordering = sent[0]
                token_ids = queue.token_ids(number, ordering)
                if running and not engine.has_room(token_ids):
                    break
                sent.popleft()
                completion, handle = engine.admit(token_ids)
                uncached = completion.prompt_tokens - completion.cached_tokens
                prefill_ends = max(clock, prefill_ends) + uncached / self.times.prefill_tokens_per_s
                outcome.served(number, completion, prefill_ends - at_s[number])
                ends = prefill_ends + self.output_tokens / self.times.decode_tokens_per_s
                heapq.heappush(running, (ends, number, handle, ordering, completion))
        outcome.total_s = clock
        outcome.largest_overtaking = queue.waiting.largest_overtaking
        return outcome


class LiveQueues:
    """The server at `base_url`, in real time, with a cache salt for each trace. Raises EngineError, ImportError."""

    def __init__(self, base_url: str, max_in_flight: int, output_tokens: int, options: Options) -> None:
        from ragorder.adapters.http_client import ServerError
        from ragorder.adapters.vllm.cache_config import read_cache_config
        from ragorder.eval.engines.models import built_prompts

        found = find_model(base_url, options.served_model, api_key=options.api_key)
        try:
            cache = read_cache_config(base_url, api_key=options.api_key)
        except ServerError as error:
            raise EngineError(str(error)) from None
        self._model = str(options.model or found.root)
        self._prompts = built_prompts(self._model)
        self._max_in_flight = max_in_flight
        self._cache: dict[str, Any] = {"block_size": cache.block_size, "capacity_tokens": cache.capacity_tokens}
        self._connect = partial(
            OpenAIEngine, base_url, found.id, output_tokens=output_tokens, api_key=options.api_key, **self._cache
        )

    @property
    def engine(self) -> dict[str, Any]:
        return {"name": "openai", "model": self._model, **self._cache}

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        return asyncio.run(self._serve(trace, at_s, discipline))

    async def _serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        outcome = QueueOutcome(len(at_s))
        now = asyncio.get_running_loop().time
        async with self._connect() as engine:
            first = trace.requests[0]
            await engine.check(self._prompts.token_ids(0, first, first.documents))
            queue = _Queue(trace, discipline, engine, self._prompts)
            limiter = ConcurrencyLimiter(self._max_in_flight, queue.waiting)
            start = now()

            async def serve(number: int) -> None:
                await asyncio.sleep(max(0.0, start + at_s[number] - now()))
                arrived_s = now()
                async with limiter.slot(number, queue.lengths(number)):
                    ordering = queue.order(number)
                    waited_s = now() - arrived_s
                    completion = await engine.complete(queue.token_ids(number, ordering))
                    ordering.confirm(completion.cached_tokens)
                outcome.served(number, completion, waited_s + (completion.ttft_s or 0.0))
                outcome.tbt_s[number] = completion.tbt_s

            async with asyncio.TaskGroup() as group:
                for number in range(len(at_s)):
                    group.create_task(serve(number))
            outcome.total_s = now() - start
        outcome.largest_overtaking = queue.waiting.largest_overtaking
        return outcome


def own_server(model: Path | None, capacity_tokens: int | None) -> VLLMServer:
    """A vLLM server to be entered; without a `model`, with random weights."""
    from ragorder.eval.engines.models import longest_prompt, random_model

    model = model or random_model()
    blocks = (capacity_tokens or _OWN_CAPACITY_TOKENS) // _OWN_BLOCK_SIZE
    longest = min(blocks * _OWN_BLOCK_SIZE, longest_prompt(model))
    return VLLMServer(model, blocks=blocks, block_size=_OWN_BLOCK_SIZE, max_model_len=longest)


@dataclass(frozen=True, slots=True)
class EmbeddedQueues(VirtualQueues):
    """Documents are ordered on arrival, as by the proxy; then requests wait in the engine. Its steps are computed,
    and take the time of their tokens at the rate of `times`; loads from host memory take none."""

    name = "torch"
    model: TorchModel = field(kw_only=True)

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        prompts, outcome = RandomPrompts(self.model.vocabulary), QueueOutcome(len(at_s))
        served = TorchEngine(
            self.model,
            capacity_tokens=self.capacity_tokens,
            output_tokens=self.output_tokens,
            max_requests=self.max_in_flight,
            schedule_window=discipline.window,
        )
        lengths: dict[str, Any] = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens}
        orderer = make_orderer("free", engine=served, **lengths)
        waiting: dict[int, tuple[int, Ordering[Document]]] = {}
        order: list[int] = []
        clock, arrived, computed = 0.0, 0, 0
        with closing(served):
            engine = served.engine
            while arrived < len(at_s) or engine.has_unfinished:
                if not engine.has_unfinished:
                    clock = max(clock, at_s[arrived])
                while arrived < len(at_s) and at_s[arrived] <= clock:
                    request = trace.requests[arrived]
                    ordering = orderer.order(request.documents, lengths=Lengths(suffix=prompts.suffix_tokens(request)))
                    token_ids = prompts.token_ids(arrived, request, ordering.documents)
                    waiting[engine.add(served.request(token_ids))] = arrived, ordering
                    arrived += 1
                updates = engine.step()
                total = engine.stats().computed_tokens
                clock += (total - computed) / self.times.prefill_tokens_per_s
                computed = total
                for update in updates:
                    number, ordering = waiting[update.request_id]
                    if number not in order:
                        order.append(number)
                        outcome.ttft_s[number] = clock - at_s[number]
                    if update.completion is not None:
                        completion = served.completion(update.completion)
                        outcome.served(number, completion, outcome.ttft_s[number])
                        ordering.confirm(completion.cached_tokens)
                        del waiting[update.request_id]
        outcome.total_s = clock
        outcome.largest_overtaking = _largest_overtaking(order)
        return outcome


def _largest_overtaking(order: Sequence[int]) -> int:
    return max((sum(other > mine for other in order[:place]) for place, mine in enumerate(order)), default=0)


def _capacity(value: object) -> object:
    return None if value == "unlimited" else value


def _others(block: Block) -> list[str]:
    measured = dict.fromkeys(policy for group in block.groups for policy in group.policies)
    return [policy for policy in measured if policy != _BASELINE]


def _shorter_rows(block: Block) -> Iterator[list[str | Entry]]:
    for group in block.groups:
        yield [group.label, *(_times_shorter(group, policy) for policy in _others(block))]


def _times(title: str, metrics: Sequence[Metric], note: str = "") -> TableForm:
    def rows(block: Block) -> Iterator[list[str]]:
        for group in block.groups:
            if group.has(metrics[0].column):
                policies = (_BASELINE, *_others(block))
                times = ([format_number(group.value(policy, each)) for each in metrics] for policy in policies)
                yield [group.label, *map(", ".join, times)]

    statistics = ", ".join(each.statistic for each in metrics)
    headings: Callable[[Block], list[str]] = lambda block: ["", _BASELINE, *_others(block)]  # noqa: E731
    return TableForm(f"{title}: {statistics}, ms", headings, note, by=(), rows=rows)


class ReorderingCell(SuiteCell):
    """`load` is the arrival rate as a multiple of the rate at which a full queue is served first come, first served.

    At most `max_in_flight` requests (the paper has 4) are at the engine; `capacity_tokens` is its cache. `window` is
    the reordered queues'. `prefill_rate`, in tokens/s, is the simulated engine's.
    """

    workload: Annotated[str, one_of("workload", WORKLOADS)]
    capacity_tokens: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_capacity)] = 16_000
    load: float = Field(gt=0)
    requests: int = Field(600, ge=1)
    window: int = Field(32, ge=0)
    max_in_flight: int = Field(4, ge=1)
    output_tokens: int = Field(1, ge=1)
    prefill_rate: float = Field(20_000.0, gt=0)


class Reordering(Experiment):
    """A queue discipline on a trace. `facts`: the arrival rate, the whole time, the largest overtaking."""

    kind = "reordering"
    base = RunRecord
    cell = ReorderingCell
    policies: ClassVar[Any] = DISCIPLINES
    one_job = True
    unit = "queues"
    counts = "policies"
    tables: ClassVar[Any] = (
        TableForm("Mean TTFT, times shorter", lambda block: ["", *_others(block)], _NOTE, by=(), rows=_shorter_rows),
        _times("Time to first token", (TTFT_P50, TTFT_MEAN, TTFT_P99)),
        _times("Time between tokens", (TBT_P50, TBT_P99), _TBT_NOTE),
    )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rates: dict[object, float] = {}

    def obstacle(self, suite: Suite, cell: ReorderingCell, policy: str) -> str | None:
        if self.options.engine == "torch":
            if DISCIPLINES[policy].waiting:
                return "the embedded engine's documents are ordered on arrival, before their request waits"
            return lacks_torch()
        if self.options.engine not in ("sim", "openai"):
            return "queues are served by --engine sim, torch or openai"
        if self.options.base_url is not None and len({each.capacity_tokens for each in suite.cells}) > 1:
            return "a running server has one cache size: leave out --base-url, or --set capacity_tokens=unlimited"
        return None

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ReorderingCell = job.cell
        trace = trace_of_workload(make_workload(cell.workload, job.seed, requests=job.requests), job.requests)
        queues = self._queues(cell)
        rate = cell.load * self._rate(cell, job, trace, queues)
        at_s = [arrival.at_s for arrival in poisson_arrivals(rate, job.requests, job.seed)]
        for policy in rotated(job.policies, job.seed):
            served = queues.serve(trace, at_s, DISCIPLINES[policy].within(cell.window))
            tbt_ms = [None if seconds is None else round(1e3 * seconds, 3) for seconds in served.tbt_s]
            yield {
                "policy": policy,
                "engine": queues.engine,
                "rows": {
                    "prompt_tokens": served.prompt_tokens,
                    "cached_tokens": served.cached_tokens,
                    "ttft_ms": [round(1e3 * seconds, 3) for seconds in served.ttft_s],
                    **({} if tbt_ms.count(None) == len(tbt_ms) else {"tbt_ms": tbt_ms}),
                },
                "facts": {
                    "requests_per_s": rate,
                    "total_s": served.total_s,
                    "largest_overtaking": served.largest_overtaking,
                },
            }
            advance()

    def _rate(self, cell: ReorderingCell, job: Job, trace: Trace, queues: QueueServer) -> float:
        key = (cell.model_copy(update={"load": 1.0}), job.seed, job.requests)
        if key not in self._rates:
            served = queues.serve(trace, [0.0] * job.requests, DISCIPLINES["fcfs"])
            self._rates[key] = job.requests / served.total_s
        return self._rates[key]

    def _queues(self, cell: ReorderingCell) -> QueueServer:
        """Raises EngineError for a server that cannot be measured."""
        options, shape = self.options, (cell.max_in_flight, cell.output_tokens)
        times = ServiceTimes(cell.prefill_rate)
        if options.engine == "sim":
            return SimulatedQueues(cell.capacity_tokens, *shape, times)
        if options.engine == "torch":
            from ragorder.benchmarks.kernels.embedded.models import SHAPES

            return self.kept(
                ("torch", cell.capacity_tokens, cell.prefill_rate, *shape),
                lambda: EmbeddedQueues(cell.capacity_tokens, *shape, times, model=SHAPES["tiny"].make()),
            )

        def start() -> LiveQueues:
            url = options.base_url
            if url is None:
                url = self.resources.enter_context(own_server(options.model, cell.capacity_tokens)).base_url
            return LiveQueues(url, *shape, options)

        return self.kept((cell.capacity_tokens, *shape), start)


def _times_shorter(group: RecordGroup[Record], policy: str) -> Entry:
    pairs = [[TTFT_MEAN.value([run]) for run in pair] for pair in group.pairs(_BASELINE, policy)]
    ratios = [plain / mean for plain, mean in pairs if plain and mean]
    if not ratios:
        return Entry("–")
    overtaking = max(int(run.facts.get("largest_overtaking", 0)) for run in group.runs(policy))
    spread = f" ({format_number(min(ratios), 2)} to {format_number(max(ratios), 2)})" if len(ratios) > 1 else ""
    return Entry(f"{format_number(fmean(ratios), 2)}{spread}", f"overtaken by {overtaking}")
