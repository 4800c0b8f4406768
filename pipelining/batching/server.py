"""Server with separate batches for retrieval and generation (RAGDoll 4.1)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, Self, cast

from ragorder.pipelining.batching.batchers import AllWaiting, BacklogAware, Batcher
from ragorder.pipelining.batching.degradation import Relief
from ragorder.pipelining.batching.generation_worker import (
    GenerationWorker,
    JoiningGenerationWorker,
    StaticGenerationWorker,
)
from ragorder.pipelining.batching.kv import Context, KVTokens
from ragorder.pipelining.batching.requests import BatchedAnswer, BatchedRequest, BatchedStream, BatchEvent, RequestTrace
from ragorder.pipelining.batching.retrieval import BatchRetrieval, ConcurrentRetrieval
from ragorder.pipelining.batching.retrieval_worker import RetrievalWorker
from ragorder.pipelining.protocols import D, Q, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter, QueueFullError
from ragorder.pipelining.retrieval import Retrieval
from ragorder.pipelining.servers import FirstFailures, in_thread, run_batch, wait_for_end

_EVENTS = 4096


class ServingPlacement(Protocol):
    """The largest generation batch, and the partitions in memory."""

    @property
    def batch(self) -> int: ...

    @property
    def partitions(self) -> int: ...


class DecoupledServer(Generic[Q, D, R]):
    """Retrieval and generation of many requests on one machine, in separate batches. For one event loop.

        retrieval = PartitionedRetrieval(PartitionedSearch("index.faiss"), embed, documents.__getitem__, top_k=5)
        async with DecoupledServer(retrieval, prompts, engine) as server:
            answer = await server.run("Which drawer?")
            async with server.stream("Which drawer?") as stream: ...

    - `retrieval`: for batches, or of single questions, whose searches run in parallel
    - `batching`, `searching`: policies of generations and searches (default: `BacklogAware`, `AllWaiting`)
    - `joins`: whether requests can join between two steps of the engine
    - `kv`, `kv_limit`: KV tokens of the requests that run together
    - `lengths`: the largest cached share goes first, within `window`
    - `reliefs`: free memory, before `relieve` of engine and retrieval
    - `max_retries`: of a request alone, after a shortage (`is_shortage`)
    - `max_contexts`: requests that wait for generation
    - `observer`: gets each `BatchEvent` and final `RequestTrace`
    """

    def __init__(
        self,
        retrieval: BatchRetrieval[Q, D] | Retrieval[Q, D],
        prompts: RequestBuilder[Q, D, R],
        engine: StreamingEngine[R],
        *,
        placement: ServingPlacement | None = None,
        batching: Batcher | None = None,
        searching: Batcher | None = None,
        joins: bool = True,
        kv: KVTokens[Q, D] | None = None,
        kv_limit: int | None = None,
        lengths: Callable[[Q, Sequence[D]], CachedLengths] | None = None,
        window: int = 32,
        reliefs: Sequence[Relief] = (),
        max_retries: int = 2,
        max_requests: int = 1024,
        max_contexts: int = 256,
        observer: Callable[[BatchEvent | RequestTrace], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_contexts", max_contexts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if kv_limit is not None and (kv is None or kv_limit < 1):
            raise ValueError(f"kv_limit is {kv_limit}: give at least 1, and kv, which counts tokens (TrieKV)")
        self.max_requests = max_requests
        self.trace: deque[BatchEvent] = deque(maxlen=_EVENTS)
        self._engine = engine
        self._lengths = lengths
        self._observer = observer
        self._clock = clock
        self._requests: dict[BatchedRequest[Q, D], None] = {}
        self._limiter: ConcurrencyLimiter[None] = ConcurrencyLimiter(max_requests, CacheAwareQueue(window=0))
        self._closed = False
        self._warn = FirstFailures()
        self._placing = asyncio.Lock()
        if hasattr(retrieval, "search_batch"):
            self._searched: BatchRetrieval[Q, D] = cast("BatchRetrieval[Q, D]", retrieval)
        else:
            self._searched = ConcurrentRetrieval(retrieval)
        common: dict[str, Any] = {"max_retries": max_retries, "observe": self._record, "clock": clock}
        own = [each for each in (engine, self._searched) if callable(getattr(each, "relieve", None))]
        chosen = (*reliefs, *cast("list[Relief]", own))
        worker: type[GenerationWorker[Q, D, R]] = JoiningGenerationWorker if joins else StaticGenerationWorker
        self.retrieving: RetrievalWorker[Q, D] = RetrievalWorker(
            self._searched,
            self._found,
            lambda: max_contexts - self.generating.waiting,
            batcher=searching or AllWaiting(),
            queue=CacheAwareQueue(window=0),
            reliefs=chosen,
            **common,
        )
        self.generating = worker(
            engine,
            prompts,
            kv=kv,
            kv_limit=kv_limit,
            arrivals_s=self.retrieving.expected_s,
            made_room=self.retrieving.wake,
            batcher=batching or BacklogAware(),
            queue=CacheAwareQueue(window if lengths is not None else 0),
            reliefs=chosen,
            **common,
        )
        self._placed: int = getattr(self._searched, "partitions", None) or 0
        if placement is not None:
            self._check_placement(placement)
            self.generating.most = placement.batch
            self._resize_now(placement.partitions)

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def contexts(self, count: int = 8) -> Sequence[Context[Q, D]]:
        upcoming = self.generating.upcoming(count)
        return [Context(request.question, request.documents) for request in upcoming]

    async def run(self, question: Q) -> BatchedAnswer[D]:
        """Return the answer, or raise the request's error, QueueFullError, or RuntimeError if closed."""
        return await self._run(question)

    def stream(self, question: Q) -> BatchedStream[D]:
        """Lazy. Raises what `run` raises, and AnswerChangedError."""
        return BatchedStream(self._stream(question))

    def batch(
        self, questions: Iterable[Q], *, on_progress: Callable[[int], object] | None = None
    ) -> AsyncGenerator[tuple[int, BatchedAnswer[D] | Exception], None]:
        """Yield (number of the question, answer or error) as requests end. At most half of `max_requests` run at once;
        they wait while the server is full."""
        at_once = max(1, self.max_requests // 2)
        return run_batch(
            questions, lambda each: self._run(each, patient=True), at_once=at_once, on_progress=on_progress
        )

    async def place(self, placement: ServingPlacement) -> None:
        """Change to another placement while requests run; meanwhile the smaller batch holds.

        Fewer partitions are set first and more last, so that memory suffices. An engine whose `place` returns None is
        asked again whenever a running request has ended. Raises TimeoutError if it still cannot after all of them, and
        errors of the engine; batch and partitions are then as before.
        """
        self._check_placement(placement)
        async with self._placing:
            most, limit, resident = self.generating.most, self.generating.kv_limit, self._resident
            self.generating.most = placement.batch if most is None else min(most, placement.batch)
            try:
                if placement.partitions < resident:
                    await self._resize(placement.partitions)
                tokens = await self._place_engine(placement)
                if placement.partitions > resident:
                    await self._resize(placement.partitions)
            except BaseException:
                self.generating.most, self.generating.kv_limit = most, limit
                # Partitions that were relieved meanwhile are not given back.
                if placement.partitions < resident or self._resident > resident:
                    await self._resize(resident)
                self.generating.wake()
                raise
            self.generating.most = placement.batch
            if limit is not None and tokens is not None:
                self.generating.kv_limit = tokens
            self.generating.wake()

    async def _place_engine(self, placement: ServingPlacement) -> int | None:
        """Return the engine's KV tokens then, or None if it places nothing."""
        place = getattr(self._engine, "place", None)
        if not callable(place):
            return None
        before = list(self.generating.running)
        while (tokens := await in_thread(place, placement)) is None:
            before = [request for request in before if request in self.generating.running]
            if not before:
                raise TimeoutError("the engine has no room for this placement while requests run")
            ends = [request.ended for request in before]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # Its worker, and the engine, drop it now.
            await asyncio.sleep(0)
        return int(tokens)

    async def close(self) -> None:
        """End all requests with RuntimeError. Engine and retrieval stay open."""
        self._closed = True
        for request in tuple(self._requests):
            request.fail(RuntimeError("the server was closed before this request ended"), self._clock())
            request.abandoned = True
        await self.retrieving.close()
        await self.generating.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, question: Q, *, patient: bool = False) -> BatchedAnswer[D]:
        async with self._request(question, patient=patient) as request:
            return await asyncio.shield(request.ended)

    async def _stream(self, question: Q) -> AsyncGenerator[str | BatchedAnswer[D], None]:
        chunks: asyncio.Queue[str | None] = asyncio.Queue()
        async with self._request(question, chunks) as request:
            while (text := await chunks.get()) is not None:
                yield text
            answer = await asyncio.shield(request.ended)
        yield answer

    @asynccontextmanager
    async def _request(
        self, question: Q, chunks: asyncio.Queue[str | None] | None = None, *, patient: bool = False
    ) -> AsyncIterator[BatchedRequest[Q, D]]:
        self._check_open()
        if not patient and not self._limiter.has_room:
            raise QueueFullError(
                f"{len(self._requests)} requests are in the server: raise max_requests, or retry later"
            )
        async with self._limiter.slot(None):
            self._check_open()
            ended: asyncio.Future[BatchedAnswer[D]] = asyncio.get_running_loop().create_future()
            request = BatchedRequest[Q, D](question, RequestTrace(self._clock()), ended, chunks)
            self._requests[request] = None
            self.retrieving.start()
            self.generating.start()
            self.retrieving.enter(request)
            told = False
            try:
                yield request
                told = True
            except Exception:
                told = True
                raise
            finally:
                await self._leave(request, told)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this server is closed")

    async def _leave(self, request: BatchedRequest[Q, D], told: bool) -> None:
        """`told`: the caller has the request's outcome."""
        request.cancel(self._clock())
        if not told:
            # It may have ended just before it was cancelled.
            request.trace.outcome = "cancelled"
        self.retrieving.leave(request)
        self.generating.leave(request)
        try:
            await self.generating.end(request)
        finally:
            # A context that has left the queue makes room for others.
            self.retrieving.wake()
            if request in self._requests:
                del self._requests[request]
                self._observe(request.trace)

    def _found(self, request: BatchedRequest[Q, D]) -> None:
        lengths = self._lengths
        if lengths is None:
            self.generating.enter(request)
        else:
            self.generating.enter(request, lambda: lengths(request.question, request.documents))

    def _check_placement(self, placement: ServingPlacement) -> None:
        if placement.batch < 1 or placement.partitions < 0:
            raise ValueError(
                f"a placement has a batch of at least 1 and no negative partitions, got batch={placement.batch}, "
                f"partitions={placement.partitions}"
            )

    @property
    def _resident(self) -> int:
        """The most partitions in memory; of a retrieval that does not say so, those of the last placement."""
        resident: int | None = getattr(self._searched, "resident", None)
        return self._placed if resident is None else resident

    async def _resize(self, partitions: int) -> None:
        resizing = asyncio.create_task(in_thread(self._resize_now, partitions))
        # The thread goes on if this is cancelled: only then is known what has to be set back.
        await wait_for_end(lambda: (resizing,))
        await resizing

    def _resize_now(self, partitions: int) -> None:
        self._placed = partitions
        resize = getattr(self._searched, "resize", None)
        if callable(resize):
            resize(partitions)

    def _record(self, event: BatchEvent) -> None:
        self.trace.append(event)
        self._observe(event)

    def _observe(self, observed: BatchEvent | RequestTrace) -> None:
        if self._observer is not None:
            self._warn.guard("an observer", self._observer, observed)
