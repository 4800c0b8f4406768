"""Requests served by one system on the virtual clock, by hand or by the product's own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ragorder import Orderer, Ordering
from ragorder.benchmarks.doll.batching.generation import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    SIZES,
    BacklogSizes,
    Batches,
    FixedSizes,
    Joining,
    KeptKV,
    Line,
    Moment,
    Passes,
    Prompts,
    RateSizes,
    Served,
    Sizes,
)
from ragorder.benchmarks.doll.batching.settings import (
    PARTITIONS,
    SETTINGS,
    TOP_K,
    BatchingCell,
    Generator,
    Setting,
    System,
)
from ragorder.document import Document
from ragorder.eval.data.arrivals import ArrivalStep
from ragorder.eval.virtual.costs import EngineCosts
from ragorder.eval.virtual.engine import VirtualEngine
from ragorder.pipelining import AnswerChunk, Usage
from ragorder.pipelining.batching import Batcher, BatchEvent, DecoupledServer, RequestTrace, SearchTask, TrieKV
from ragorder.pipelining.reordering import CachedLengths

_INSTANT = 1e-9
_UNBOUNDED = 1_000_000
_WINDOW = 32
_OWN_TOKENS = QUESTION_TOKENS + ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class _TokenRequest:
    token_ids: Sequence[int]

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)


class _Partitions:
    """A `BatchRetrieval` of questions by number: a pass, then their documents."""

    def __init__(self, passes: Passes, documents: Callable[[int], Sequence[Document]]) -> None:
        self._passes = passes
        self._documents = documents

    async def search_batch(
        self, tasks: Sequence[SearchTask[int]], /
    ) -> AsyncGenerator[tuple[int, Sequence[Document] | Exception], None]:
        await self._passes.search([])
        for place, task in enumerate(tasks):
            yield place, self._documents(task.question)


class _JoinedPartitions(_Partitions):
    """A `JoinableRetrieval`: a pass without an end, in which each question stays for all partitions."""

    async def search_joined(
        self, tasks: Sequence[SearchTask[int]], more: Callable[[], Sequence[SearchTask[int]]], /
    ) -> AsyncGenerator[tuple[int, Sequence[Document] | Exception], None]:
        joined = list(tasks)
        left = dict.fromkeys(range(len(joined)), PARTITIONS)
        while left:
            await self._passes.advance()
            for place in list(left):
                left[place] -= 1
                if not left[place]:
                    del left[place]
                    yield place, self._documents(joined[place].question)
            if left:
                joining = more()
                left |= dict.fromkeys(range(len(joined), len(joined) + len(joining)), PARTITIONS)
                joined += joining


class _BatchEngine:
    """Requests sent at one moment are a batch, which ends together after `seconds` of its size."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.busy_s = 0.0
        self._seconds = seconds
        self._sent: list[asyncio.Future[None]] = []
        self._batch: asyncio.Task[None] | None = None

    async def stream(self, request: _TokenRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent.append(ended)
        if self._batch is None:
            self._batch = asyncio.create_task(self._run())
        await ended
        yield AnswerChunk("", Usage(request.prompt_tokens, 0, ANSWER_TOKENS))

    async def _run(self) -> None:
        # Time passes once the whole batch has been sent.
        await asyncio.sleep(_INSTANT)
        batch, self._sent, self._batch = self._sent, [], None
        seconds = self._seconds(len(batch))
        await asyncio.sleep(seconds)
        self.busy_s += seconds
        for ended in batch:
            if not ended.done():
                ended.set_result(None)


class _TokenPrompts:
    """Prompts of a corpus, by rank or ordered for a cache and for those that wait."""

    def __init__(
        self, prompts: Prompts, orderer: Orderer | None, waiting: Callable[[], list[Sequence[Document]]]
    ) -> None:
        self._prompts = prompts
        self._orderer = orderer
        self._waiting = waiting

    def preview(self, question: int, documents: Sequence[Document], /) -> _TokenRequest:
        found = documents if self._orderer is None else self._orderer.preview(documents, waiting=self._waiting())
        return _TokenRequest(self._prompts.token_ids(question, found))

    def commit(self, question: int, documents: Sequence[Document], /) -> _Committed:
        ordering = None if self._orderer is None else self._orderer.order(documents, waiting=self._waiting())
        found = documents if ordering is None else ordering.documents
        return _Committed(_TokenRequest(self._prompts.token_ids(question, found)), ordering)


@dataclass(frozen=True, slots=True)
class _Committed:
    request: _TokenRequest
    ordering: Ordering[Document] | None

    def confirm(self, usage: Usage | None, /) -> None:
        if self.ordering is not None:
            cached = None if usage is None else usage.cached_tokens
            self.ordering.confirm(cached, self.request.prompt_tokens + ANSWER_TOKENS)

    def discard(self) -> None:
        if self.ordering is not None:
            self.ordering.discard()


class Decoupled:
    """A `DecoupledServer` on a virtual clock: in batches, or joined at each step with `capacity_tokens` of kept KV."""

    def __init__(
        self,
        passes: Passes,
        prompts: Prompts,
        generator: Generator,
        seconds: Callable[[int], float],
        batching: Batcher,
        moment: Callable[[int], tuple[float, int]],
        *,
        capacity_tokens: int | None,
        request_s: float,
        joined_passes: bool = False,
    ) -> None:
        self.batch = 1
        self.trace: list[Moment] = []
        self._moment = moment
        self._engine: _BatchEngine | VirtualEngine[_TokenRequest]
        options: dict[str, Any] = {}
        orderer = None
        if capacity_tokens is None:
            self._engine = _BatchEngine(seconds)
        else:
            costs = EngineCosts(
                step_s=generator.base_s / ANSWER_TOKENS,
                prefill_token_s=request_s / prompts.mean_tokens,
                context_token_s=0.0,
                capacity_tokens=capacity_tokens,
                token_budget=_UNBOUNDED,
                max_requests=_UNBOUNDED,
            )
            self._engine = VirtualEngine(costs, lambda _: ("word",) * ANSWER_TOKENS)
            cache = self._engine.cache
            orderer = Orderer(
                capacity_tokens=capacity_tokens,
                block_size=cache.block_size,
                partial_blocks_first=cache.partial_blocks_first,
                suffix_tokens=_OWN_TOKENS,
            )
            options = {
                "kv": TrieKV(key=attrgetter("key"), tokens=attrgetter("token_count"), own_tokens=lambda _: _OWN_TOKENS),
                "kv_limit": capacity_tokens,
                "lengths": _lengths(orderer),
            }
        self._server: DecoupledServer[int, Document, _TokenRequest] = DecoupledServer(
            (_JoinedPartitions if joined_passes else _Partitions)(passes, prompts.documents.__getitem__),
            _TokenPrompts(prompts, orderer, self._upcoming),
            self._engine,
            batching=batching,
            joins=capacity_tokens is not None,
            max_requests=_UNBOUNDED,
            max_contexts=_UNBOUNDED,
            observer=self._observe,
            clock=asyncio.get_running_loop().time,
            **options,
        )

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    @property
    def running(self) -> int:
        return len(self._server.generating.running)

    @property
    def kept(self) -> VirtualEngine[_TokenRequest] | None:
        """The engine that keeps KV."""
        return self._engine if isinstance(self._engine, VirtualEngine) else None

    def _upcoming(self) -> list[Sequence[Document]]:
        return [context.documents for context in self._server.contexts(_WINDOW)]

    async def serve(self, requests: Sequence[Served]) -> None:
        async with self._server:
            await asyncio.gather(*map(self._ask, requests))

    async def _ask(self, request: Served) -> None:
        await asyncio.sleep(request.at_s)
        trace = (await self._server.run(request.number)).trace
        times = trace.retrieval_began_s, trace.found_s, trace.generation_began_s, trace.ended_s
        request.search_s, request.found_s, request.begun_s, request.ended_s = (each or 0.0 for each in times)

    def _observe(self, observed: BatchEvent | RequestTrace) -> None:
        if isinstance(observed, BatchEvent) and (observed.worker, observed.event) == ("generation", "began"):
            self.batch = observed.running
            moment = Moment(observed.at_s, observed.running, observed.waiting, *self._moment(observed.running))
            self.trace.append(moment)


def _lengths(orderer: Orderer) -> Callable[[int, Sequence[Document]], CachedLengths]:
    def lengths(_: int, documents: Sequence[Document]) -> CachedLengths:
        cached, total = orderer.predict_cached_tokens(documents)
        return CachedLengths(cached, total - cached + QUESTION_TOKENS)

    return lengths


def rates(steps: Sequence[ArrivalStep]) -> Callable[[float], float]:
    """Requests a minute at a time; after the last step as in it."""

    def rate(now_s: float) -> float:
        for step in steps:
            now_s -= step.seconds
            if now_s < 0:
                break
        return 60 * step.requests / step.seconds

    return rate


async def serve(
    system: System, cell: BatchingCell, at_s: Sequence[float], steps: Sequence[ArrivalStep], prompts: Prompts | None
) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times. To be run on a virtual loop. `prompts`: for systems
    that keep KV.

    Facts: seconds until all are answered, and those that searches and generation were busy; the `trace` of batches, or
    of steps that requests join; prompt tokens, and those computed, where KV is kept.
    """
    run = _Run(system, cell, steps, prompts, len(at_s))
    requests = [Served(number, at) for number, at in enumerate(at_s)]
    loop = asyncio.get_running_loop()

    async def arrive() -> None:
        for request in requests:
            await asyncio.sleep(max(0.0, request.at_s - loop.time()))
            run.line.put(request)
        run.line.close()

    await (run.product.serve(requests) if run.product is not None else asyncio.gather(arrive(), *run.workers()))
    return {"rows": _rows(requests), "facts": {"total_s": loop.time(), **run.facts()}}


class _Run:
    def __init__(
        self,
        system: System,
        cell: BatchingCell,
        steps: Sequence[ArrivalStep],
        prompts: Prompts | None,
        requests: int,
    ) -> None:
        self.line = Line()
        self._found = Line()
        self._system = system
        self._cell = cell
        self._setting: Setting = SETTINGS[cell.setting]
        self._passes = Passes(self._setting.load_s, self._resident, self._slowed)
        self.product: Decoupled | None = None
        self._kept: KeptKV | VirtualEngine[Any] | None = None
        self._generation: Batches | Joining | Decoupled
        generator = self._generator()
        request_s = generator.request_s * cell.top_k / TOP_K
        capacity = None
        if system.kept:
            assert prompts is not None, "systems that keep KV need prompts"
            capacity = round(generator.most * prompts.mean_tokens)
        if system.server:
            self.product = self._generation = Decoupled(
                self._passes,
                prompts or Prompts.none(requests),
                generator,
                self._seconds,
                # How many may join is limited by their KV.
                BacklogSizes(self._seconds, 4 * generator.most, (*SIZES, 4 * generator.most)).batcher
                if system.joined
                else BacklogSizes(self._seconds, generator.most).batcher,
                self._moment,
                capacity_tokens=capacity,
                request_s=request_s,
                joined_passes=system.passes,
            )
            self._kept = self.product.kept
        elif system.joined:
            kept = None
            if capacity is not None and prompts is not None:
                kept = self._kept = KeptKV(prompts, capacity, ordered=system.kept == "ordered")
            self._generation = Joining(generator, kept, self._moment, request_s)
        else:
            self._generation = Batches(self._seconds, self._sizes(generator, rates(steps)), self._moment)

    def workers(self) -> list[Any]:
        """Of what is not the product's own server."""
        assert not isinstance(self._generation, Decoupled), "it has workers of its own"
        if self._system.serial:
            return [self._serial()]
        search = self._passes.run_joined if self._system.passes else self._passes.run
        return [search(self.line, self._found), self._generation.run(self._found)]

    def facts(self) -> dict[str, Any]:
        kept = self._kept
        tokens = {} if kept is None else {"prompt_tokens": kept.prompt_tokens, "computed_tokens": kept.computed_tokens}
        return {
            "searching_s": self._passes.busy_s,
            "generating_s": self._generation.busy_s,
            "trace": [
                [round(each.at_s, 1), each.batch, each.waiting, round(each.device_kv, 3), each.resident]
                for each in self._generation.trace
            ],
            **tokens,
        }

    async def _serial(self) -> None:
        assert isinstance(self._generation, Batches), "requests join where generation has a worker of its own"
        loop = asyncio.get_running_loop()
        while batch := await self._generation.next_batch(self.line):
            waiting, began_s = len(self.line), loop.time()
            await self._passes.search(batch)
            await self._generation.generate(batch, waiting)
            self._generation.learn(len(batch), loop.time() - began_s)

    def _generator(self) -> Generator:
        system, cell, setting = self._system, self._cell, self._setting
        found = setting.generator(system.engine, top_k=cell.top_k)
        most = found.most
        if system.serial and system.engine == "prefetch":
            most = setting.serial_most * TOP_K // cell.top_k if setting.kv_bound else setting.serial_most
        base_s = found.base_s if cell.weights is None else found.base_s * (1 - cell.weights) / setting.streamed
        return Generator(base_s, found.request_s, max(1, cell.batch or most))

    def _seconds(self, batch: int) -> float:
        seconds = self._generator().seconds(batch, top_k=self._cell.top_k)
        depth = self._system.depth
        return seconds if depth is None else seconds * self._setting.prefetch_factor(batch, depth)

    def _sizes(self, generator: Generator, rate: Callable[[float], float]) -> Sizes:
        if self._cell.batch is not None:
            return FixedSizes(self._cell.batch)
        if self._system.sizes == "rate":
            return RateSizes(rate, generator.most)
        if self._system.sizes == "fixed":
            return FixedSizes(min(self._setting.fixed, generator.most))
        if not self._system.serial:
            return BacklogSizes(self._seconds, generator.most)
        pass_s = self._setting.pass_s
        return BacklogSizes(lambda batch: pass_s + self._seconds(batch), generator.most)

    def _resident(self) -> int:
        if self._cell.resident is not None:
            return self._cell.resident
        return self._moment(self._generation.batch)[1]

    def _slowed(self) -> float:
        return self._setting.disturbed if self._generation.running else 1.0

    def _moment(self, batch: int) -> tuple[float, int]:
        """KV on the device, and partitions for which there is memory."""
        cell, setting = self._cell, self._setting
        resident = setting.resident(batch, top_k=cell.top_k) if self._system.placed else 0
        return setting.device_kv_share(batch, top_k=cell.top_k), resident


def _rows(requests: Sequence[Served]) -> dict[str, list[float]]:
    return {
        "at_s": [round(each.at_s, 1) for each in requests],
        "waiting_s": [round(each.waiting_s, 1) for each in requests],
        "retrieval_s": [round(each.found_s - each.search_s, 1) for each in requests],
        "generation_s": [round(each.ended_s - each.begun_s, 1) for each in requests],
        "latency_s": [round(each.ended_s - each.at_s, 1) for each in requests],
    }
