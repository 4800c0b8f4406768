"""The product's own server on the virtual clock: its queues, workers, batches and orders; only times are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ragorder import Orderer, Ordering
from ragorder.benchmarks.doll.batching.generation import Moment
from ragorder.benchmarks.doll.batching.line import Served
from ragorder.benchmarks.doll.batching.prompts import ANSWER_TOKENS, QUESTION_TOKENS, Prompts
from ragorder.benchmarks.doll.batching.retrieval import Passes
from ragorder.benchmarks.doll.batching.settings import PARTITIONS, Generator
from ragorder.document import Document
from ragorder.eval.virtual.costs import EngineCosts
from ragorder.eval.virtual.engine import VirtualEngine
from ragorder.pipelining import AnswerChunk, Usage
from ragorder.pipelining.batching import Batcher, BatchEvent, DecoupledServer, RequestTrace, SearchTask, TrieKV
from ragorder.pipelining.reordering import CachedLengths

__all__ = ["Decoupled"]

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
    """A `DecoupledServer` on a virtual clock. Without `capacity_tokens` its batches run to their ends, after `seconds`
    of their size; with it requests join an engine with the costs of `generator` at each step, as many as the trie of
    their KV leaves room for, documents ordered, and those that are cached go first. `joined_passes`: they join a pass
    at each partition, too."""

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
                "kv": TrieKV(key=_key, tokens=_tokens, own_tokens=lambda _: _OWN_TOKENS),
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


def _key(document: Document) -> str:
    return document.key


def _tokens(document: Document) -> int:
    return document.token_count


def _lengths(orderer: Orderer) -> Callable[[int, Sequence[Document]], CachedLengths]:
    def lengths(_: int, documents: Sequence[Document]) -> CachedLengths:
        cached, total = orderer.predict_cached_tokens(documents)
        return CachedLengths(cached, total - cached + QUESTION_TOKENS)

    return lengths
