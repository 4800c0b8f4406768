"""Worker for the retrieval queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from ragorder.pipelining.batching.batchers.base import Backlog
from ragorder.pipelining.batching.requests import BatchedRequest
from ragorder.pipelining.batching.retrieval import BatchRetrieval
from ragorder.pipelining.batching.worker import Worker, is_being_cancelled
from ragorder.pipelining.running_mean import RunningMean

__all__ = ["RetrievalWorker"]

Q = TypeVar("Q")
D = TypeVar("D")


class RetrievalWorker(Worker[Q, D], Generic[Q, D]):
    """Searches for a batch of requests at a time; each goes to `found` once its documents are final. At most `room()`
    requests are searched for at once: the next queue is bounded."""

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
        self._found = found
        self._room = room
        self._batch_s = RunningMean(arithmetic_start=True)
        self._began_s = 0.0

    def expected_s(self) -> Sequence[float]:
        """In how many seconds the requests of the running batch are expected to have their documents."""
        if self._batch_s.value is None or not self.running:
            return ()
        left_s = max(0.0, self._began_s + self._batch_s.value - self._clock())
        return [left_s] * len(self.running)

    async def _serve(self) -> bool:
        batch = self._next_batch()
        if not batch:
            return False
        try:
            await self._search(batch)
        except Exception as error:
            # None of them may wait for ever, whatever fails.
            for request in [each for each in batch if each in self.running]:
                self._drop(request)
                request.fail(error, self._clock())
            self._warn("the retrieval worker", error)
        return True

    async def _end_running(self) -> None:
        """The batch has ended with the worker's task."""
        self.running.clear()

    def _policy_size(self) -> int:
        return self.batcher.size(Backlog(self.waiting))

    def _partitions(self) -> int | None:
        held = getattr(self._retrieval, "partitions", None)
        return held if isinstance(held, int) else None

    def _next_batch(self) -> list[BatchedRequest[Q, D]]:
        size = self._choose(self._room())
        batch: list[BatchedRequest[Q, D]] = []
        while self._queue and len(batch) < size:
            ticket = self._queue.peek()
            size = min(size, ticket.item.most)
            if len(batch) >= size:
                break
            batch.append(self._take(ticket))
        self._size = max(1, size) if batch else self._size
        return batch

    async def _search(self, batch: list[BatchedRequest[Q, D]]) -> None:
        self._began_s = began_s = self._clock()
        before = {request: request.checkpoint for request in batch}
        for request in batch:
            request.trace.retrieval_began_s = began_s
            request.trace.retrieval_batch = max(request.trace.retrieval_batch, len(batch))
        self._event("began")
        left = dict(enumerate(batch))
        own_errors: list[tuple[BatchedRequest[Q, D], Exception]] = []
        error: Exception | None = None
        try:
            async with aclosing(self._retrieval.search_batch(batch)) as results:
                async for place, result in results:
                    # Each place once, whatever the retrieval yields.
                    if place not in left:
                        continue
                    request = left.pop(place)
                    if isinstance(result, Exception):
                        own_errors.append((request, result))
                    else:
                        self._pass_on(request, result, len(batch))
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            error = RuntimeError("the retrieval was cancelled")
        except Exception as raised:
            error = raised
        missing = [request for request in left.values() if not request.abandoned]
        if missing and error is None:
            error = RuntimeError("the retrieval ended without documents for a question")
        seconds = self._clock() - began_s
        if error is None:
            self._batch_s.add(seconds)
            self._learn(len(batch), seconds)
        for request, own in own_errors:
            await self._fail(request, len(batch), own, shared=False)
        for request in left.values():
            if error is None or request.abandoned:
                self._drop(request)
            else:
                progress = request.checkpoint is not before[request]
                await self._fail(request, len(batch), error, shared=True, progress=progress)
        self._event("ended" if error is None else "failed", seconds)
        # Other tasks have their turn, even if the retrieval never waits.
        await asyncio.sleep(0)

    def _pass_on(self, request: BatchedRequest[Q, D], documents: Sequence[D], size: int) -> None:
        self._drop(request)
        if request.abandoned:
            return
        request.documents, request.checkpoint, request.cancel_search = documents, None, None
        request.lift_limits()
        request.trace.found_s = self._clock()
        self.degradation.succeeded(size)
        self._found(request)

    async def _fail(
        self, request: BatchedRequest[Q, D], size: int, error: Exception, *, shared: bool, progress: bool = False
    ) -> None:
        if await self.degradation.retries(request, size, error, shared=shared, progress=progress):
            self._put_back(request)
        else:
            self._drop(request)
            if not request.abandoned:
                request.fail(error, self._clock())
