"""Worker for the retrieval queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, cast

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.batching.requests import BatchedRequest
from ragorder.pipelining.batching.retrieval import BatchRetrieval, JoinableRetrieval
from ragorder.pipelining.batching.worker import Occupancy, Worker, is_being_cancelled
from ragorder.pipelining.protocols import D, Q


class RetrievalWorker(Worker[Q, D], Generic[Q, D]):
    """Searches for one batch of at most `room()` requests at a time; calls `found` with each that is final."""

    name = "retrieval"

    def __init__(
        self,
        retrieval: BatchRetrieval[Q, D],
        found: Callable[[BatchedRequest[Q, D]], None],
        room: Callable[[], int],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._retrieval = retrieval
        self._joinable = callable(getattr(retrieval, "search_joined", None))
        self._found = found
        self._room = room
        # Of a batch, or of a single request where others join.
        self._search_s = RunningMean(arithmetic_start=True)
        self._occupancy: Occupancy[BatchedRequest[Q, D]] = Occupancy(self._clock)

    def expected_s(self) -> Sequence[float]:
        mean_s = self._search_s.value
        if mean_s is None:
            return ()
        now_s = self._clock()
        began_s = (request.trace.retrieval_began_s for request in self.running)
        return [max(0.0, each + mean_s - now_s) for each in began_s if each is not None]

    async def _serve(self) -> bool:
        batch = _Batch[Q, D](self._next_requests())
        if not batch.left:
            return False
        try:
            await self._search(batch)
        except Exception as error:
            # A request must not wait forever after any error.
            for request in [each for each in batch.requests if each in self.running]:
                self._drop(request)
                request.fail(error, self._clock())
            self._warn("the retrieval worker", error)
        finally:
            self._occupancy.clear()
        return True

    async def _end_running(self) -> None:
        self.running.clear()

    def _partitions(self) -> int | None:
        held = getattr(self._retrieval, "partitions", None)
        return held if isinstance(held, int) else None

    def _next_requests(self) -> list[BatchedRequest[Q, D]]:
        if not self._queue:
            return []
        size = min([self._choose(self._room()), *(each.most for each in self.running)])
        chosen: list[BatchedRequest[Q, D]] = []
        while self._queue and len(self.running) < size:
            ticket = self._queue.peek()
            size = min(size, ticket.item.most)
            if len(self.running) >= size:
                break
            chosen.append(self._take(ticket))
        if chosen:
            self._size = max(1, size)
            self._begin(chosen)
        return chosen

    def _begin(self, requests: Sequence[BatchedRequest[Q, D]]) -> None:
        now_s = self._clock()
        for request in requests:
            request.trace.retrieval_began_s = now_s
            request.peak = 0
            self._occupancy.begin(request)
        for request in self.running:
            request.peak = max(request.peak, len(self.running))
            request.trace.retrieval_batch = max(request.trace.retrieval_batch, len(self.running))
        self._event("began")

    async def _search(self, batch: _Batch[Q, D]) -> None:
        began_s, size = self._clock(), len(batch.left)
        error: Exception | None = None
        try:
            async with aclosing(self._results(batch)) as results:
                async for position, result in results:
                    # Use each position once, even if the retrieval yields it twice.
                    if position not in batch.left:
                        continue
                    request, _ = batch.left[position]
                    if isinstance(result, Exception):
                        self._occupancy.end(request)
                        await self._fail(request, result, shared=False)
                    else:
                        self._pass_on(request, result)
                    del batch.left[position]
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            error = RuntimeError("the retrieval was cancelled")
        except Exception as raised:
            error = raised
        missing = [request for request in batch.requests if not request.abandoned]
        if missing and error is None:
            error = RuntimeError("the retrieval ended without documents for a question")
        seconds = self._clock() - began_s
        if error is None and not self._joinable:
            self._search_s.add(seconds)
            self._learn(size, seconds)
        for request, before in tuple(batch.left.values()):
            if error is None or request.abandoned:
                self._drop(request)
            else:
                await self._fail(request, error, shared=True, progress=request.checkpoint is not before)
        self._event("ended" if error is None else "failed", seconds)
        # Other tasks need a turn even if the retrieval never awaits.
        await asyncio.sleep(0)

    def _results(self, batch: _Batch[Q, D]) -> AsyncGenerator[tuple[int, Sequence[D] | Exception], None]:
        first = batch.requests
        if not self._joinable:
            return self._retrieval.search_batch(first)

        def more() -> Sequence[BatchedRequest[Q, D]]:
            for request in batch.drop_abandoned():
                self._occupancy.end(request)
                self._drop(request)
            joining = [] if self._hooks else self._next_requests()
            batch.add(joining)
            return joining

        return cast("JoinableRetrieval[Q, D]", self._retrieval).search_joined(first, more)

    def _pass_on(self, request: BatchedRequest[Q, D], documents: Sequence[D]) -> None:
        self._drop(request)
        ran = self._occupancy.end(request)
        if request.abandoned:
            return
        if self._joinable and ran is not None:
            running, seconds = ran
            self._search_s.add(seconds)
            self._learn(running, seconds)
        request.documents, request.checkpoint, request.cancel_search = documents, None, None
        request.lift_limits()
        request.trace.found_s = self._clock()
        self.degradation.succeeded(request.peak)
        self._found(request)

    async def _fail(
        self, request: BatchedRequest[Q, D], error: Exception, *, shared: bool, progress: bool = False
    ) -> None:
        if await self.degradation.retries(request, request.peak, error, shared=shared, progress=progress):
            self._put_back(request)
        else:
            self._drop(request)
            if not request.abandoned:
                request.fail(error, self._clock())


class _Batch(Generic[Q, D]):
    """Requests without an outcome, by position, with their checkpoints before. A joined batch may never end."""

    def __init__(self, requests: Sequence[BatchedRequest[Q, D]]) -> None:
        self.left: dict[int, tuple[BatchedRequest[Q, D], Any]] = {}
        self._count = 0
        self.add(requests)

    @property
    def requests(self) -> list[BatchedRequest[Q, D]]:
        return [request for request, _ in self.left.values()]

    def add(self, requests: Sequence[BatchedRequest[Q, D]]) -> None:
        for request in requests:
            self.left[self._count] = request, request.checkpoint
            self._count += 1

    def drop_abandoned(self) -> list[BatchedRequest[Q, D]]:
        dropped = [position for position, (request, _) in self.left.items() if request.abandoned]
        return [self.left.pop(position)[0] for position in dropped]
