"""Worker with a queue, batches and hooks (RAGDoll 4.1, 4.2)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from ragorder.pipelining.batching.batchers import Backlog, Batcher
from ragorder.pipelining.batching.degradation import Degradation, Relief
from ragorder.pipelining.batching.requests import BatchedRequest, BatchEvent, EventName, WorkerName
from ragorder.pipelining.protocols import D, Q
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, Ticket
from ragorder.pipelining.servers import FirstFailures, call, end_all

T = TypeVar("T")


class Worker(ABC, Generic[Q, D]):
    """Serves the requests in its queue; hooks run while none is `running`. For one event loop."""

    name: WorkerName

    def __init__(
        self,
        batcher: Batcher,
        queue: CacheAwareQueue[BatchedRequest[Q, D]],
        *,
        reliefs: Sequence[Relief],
        max_retries: int,
        observe: Callable[[BatchEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self.batcher = batcher
        self.most: int | None = None
        self.running: dict[BatchedRequest[Q, D], None] = {}
        self.degradation = Degradation(reliefs, max_retries, lambda: self._event("relieved"))
        self._queue = queue
        self._tickets: dict[BatchedRequest[Q, D], Ticket[BatchedRequest[Q, D]]] = {}
        self._observe = observe
        self._clock = clock
        self._size = 0
        self._hooks: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warn = FirstFailures()
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def enter(self, request: BatchedRequest[Q, D], lengths: Callable[[], CachedLengths] | None = None) -> None:
        self._tickets[request] = self._queue.enter(request, lengths)
        self.wake()

    def leave(self, request: BatchedRequest[Q, D]) -> None:
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._queue.leave(ticket)
            self.wake()

    def upcoming(self, count: int) -> Sequence[BatchedRequest[Q, D]]:
        return self._queue.upcoming(count)

    def wake(self) -> None:
        self._changed.set()

    async def between_batches(self, hook: Callable[[], Any]) -> Any:
        """Return the result of `hook`, called while no batch runs, in a thread if it is a plain function. Raises what
        it raises, and RuntimeError if the server is closed first."""
        if self._closed:
            raise RuntimeError("the server was closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = hook, future
        self._hooks.append(entry)
        self.start()
        self.wake()
        try:
            return await future
        finally:
            if entry in self._hooks:
                # The caller was cancelled.
                self._hooks.remove(entry)
                self.wake()

    def start(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel running requests; hooks that have not begun raise RuntimeError."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            await end_all((task,))
        await self._end_running()
        for _, future in self._hooks:
            if not future.done():
                future.set_exception(RuntimeError("the server was closed"))
        self._hooks.clear()

    @abstractmethod
    async def _serve(self) -> bool:
        """Return False to wait for a change."""

    @abstractmethod
    async def _end_running(self) -> None: ...

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._reorganise()
                again = await self._serve()
            except Exception as error:
                # A policy that fails must not end later requests.
                self._warn("batching", error)
                again = False
            if not again:
                await self._changed.wait()

    async def _reorganise(self) -> None:
        while self._hooks and not self.running:
            hook, future = self._hooks.popleft()
            if future.done():
                continue
            try:
                result = await call(hook)
            except asyncio.CancelledError:
                closed = is_being_cancelled()
                if not future.done():
                    future.set_exception(RuntimeError("the server was closed" if closed else "the hook was cancelled"))
                if closed:
                    raise
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)
                self._event("reorganised")

    def _choose(self, room: int) -> int:
        if not self._queue and not self.running:
            return 0
        wanted = self._wanted()
        self._size = max(0, min(self.degradation.bound(wanted), room))
        return self._size

    def _wanted(self) -> int:
        # Without its policy a worker runs one request at a time.
        wanted = max(1, self._warn.guard("the batching policy", self._policy_size) or 1)
        return wanted if self.most is None else max(1, min(wanted, self.most))

    def _policy_size(self) -> int:
        return self.batcher.size(Backlog(self.waiting, len(self.running)))

    def _learn(self, size: int, seconds: float) -> None:
        self._warn.guard("the batching policy", self.batcher.learn, size, seconds)

    def _take(self, ticket: Ticket[BatchedRequest[Q, D]] | None = None) -> BatchedRequest[Q, D]:
        ticket = self._queue.take(ticket)
        self.running[ticket.item] = None
        return ticket.item

    def _put_back(self, request: BatchedRequest[Q, D]) -> None:
        self.running.pop(request, None)
        if (ticket := self._tickets.get(request)) is not None:
            self._queue.put_back(ticket)

    def _drop(self, request: BatchedRequest[Q, D]) -> None:
        self.running.pop(request, None)
        self._tickets.pop(request, None)

    def _event(self, event: EventName, seconds: float | None = None) -> None:
        running, kv_tokens = len(self.running), self._kv_tokens()
        partitions = self._warn.guard("an observer", self._partitions)
        self._observe(
            BatchEvent(
                self._clock(), self.name, event, self._size, running, self.waiting, kv_tokens, partitions, seconds
            )
        )

    def _kv_tokens(self) -> int | None:
        return None

    def _partitions(self) -> int | None:
        return None


def is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


R = TypeVar("R", bound=Hashable)


class Occupancy(Generic[R]):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_s = clock()
        # Sum over time of the number of running requests.
        self._area = 0.0
        self._began: dict[R, tuple[float, float]] = {}

    def begin(self, request: R) -> None:
        self._count()
        self._began[request] = self._counted_s, self._area

    def end(self, request: R) -> tuple[int, float] | None:
        """Return the mean number of running requests, itself included, and the seconds, or None."""
        self._count()
        if (began := self._began.pop(request, None)) is None:
            return None
        began_s, area = began
        seconds = self._counted_s - began_s
        mean = (self._area - area) / seconds if seconds > 0 else 1.0
        return max(1, round(mean)), seconds

    def clear(self) -> None:
        self._began.clear()

    def _count(self) -> None:
        now_s = self._clock()
        self._area += len(self._began) * (now_s - self._counted_s)
        self._counted_s = now_s
