"""Cache-aware queue for a busy engine (RAGCache 5.2)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from ragorder.errors import RagorderError

T = TypeVar("T")

_logger = logging.getLogger("ragorder")


class CachedLengths(NamedTuple):
    """Prompt tokens in the engine's cache, tokens to compute, and tokens before the documents.

    All requests share what is before the documents: counted as cached, it would let short prompts overtake long ones.
    """

    cached_tokens: float
    computed_tokens: float
    prefix_tokens: float = 0

    @property
    def priority(self) -> float:
        return max(0.0, self.cached_tokens - self.prefix_tokens) / max(1.0, self.computed_tokens)


class QueueFullError(RagorderError): ...


class Ticket(Generic[T]):
    __slots__ = ("_lengths", "_number", "_priority", "item", "overtaken")

    def __init__(self, item: T, lengths: Callable[[], CachedLengths] | None, number: int) -> None:
        self.item = item
        self.overtaken = 0
        self._lengths = lengths
        self._number = number
        self._priority = 0.0


class CacheAwareQueue(Generic[T]):
    """Takes the item with the largest cached / computed length of its documents next, of equal ones the oldest.

        queue = CacheAwareQueue(window=32)
        queue.enter("question", lambda: CachedLengths(96, 40))
        queue.take().item

    An item that `window` later ones have overtaken goes next. Without lengths, or if they raise, it counts as not
    cached. Not thread-safe.
    """

    def __init__(self, window: int = 32) -> None:
        if window < 0:
            raise ValueError(f"window must not be negative, got {window}")
        self.window = window
        self.largest_overtaking = 0
        self._waiting: OrderedDict[int, Ticket[T]] = OrderedDict()
        self._entered = 0
        self._failed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (ticket.item for ticket in self._waiting.values())

    def enter(self, item: T, lengths: Callable[[], CachedLengths] | None = None) -> Ticket[T]:
        self._entered += 1
        ticket = self._waiting[self._entered] = Ticket(item, lengths, self._entered)
        return ticket

    def leave(self, ticket: Ticket[T]) -> None:
        self._waiting.pop(ticket._number, None)

    def peek(self) -> Ticket[T]:
        if not self._waiting:
            raise IndexError("the queue is empty")
        candidates = self._candidates()
        if len(candidates) == 1 or candidates[0].overtaken >= self.window:
            return candidates[0]
        for ticket in candidates:
            ticket._priority = self._priority_of(ticket)
        return max(candidates, key=attrgetter("_priority"))

    def take(self, chosen: Ticket[T] | None = None) -> Ticket[T]:
        chosen = self.peek() if chosen is None else chosen
        candidates = self._candidates()
        for ticket in candidates:
            if ticket is chosen:
                break
            ticket.overtaken += 1
        self.largest_overtaking = max(self.largest_overtaking, candidates[0].overtaken)
        del self._waiting[chosen._number]
        return chosen

    def put_back(self, ticket: Ticket[T]) -> None:
        later = [number for number in self._waiting if number > ticket._number]
        self._waiting[ticket._number] = ticket
        for number in later:
            self._waiting.move_to_end(number)

    def upcoming(self, count: int) -> list[T]:
        candidates = islice(self._waiting.values(), self.window + 1)
        return [ticket.item for ticket in nlargest(count, candidates, key=attrgetter("_priority"))]

    def _candidates(self) -> list[Ticket[T]]:
        return list(islice(self._waiting.values(), self.window + 1))

    def _priority_of(self, ticket: Ticket[T]) -> float:
        if ticket._lengths is None:
            return 0.0
        try:
            return ticket._lengths().priority
        except Exception as error:
            if not self._failed:
                self._failed = True
                _logger.warning("a request counts as not cached: %s; later ones are not logged", type(error).__name__)
            return 0.0


@dataclass(eq=False, slots=True)
class _Arrival(Generic[T]):
    item: T
    lengths: Callable[[], CachedLengths] | None
    admitted: asyncio.Future[None]
    ticket: Ticket[T] | None = None


class ConcurrencyLimiter(Generic[T]):
    """Admits at most `limit` requests at a time; at most `max_waiting` others wait in `queue`.

        async with limiter.slot(request, lengths):
            ...  # order the documents, send the request, read the answer to its end

    For one event loop.
    """

    def __init__(self, limit: int, queue: CacheAwareQueue[T], *, max_waiting: int | None = None) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        if max_waiting is not None and max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, got {max_waiting}")
        self.limit = limit
        self.queue = queue
        self.max_waiting = max_waiting
        self.in_flight = 0
        self._admitted: dict[Ticket[T], asyncio.Future[None]] = {}
        self._patient: deque[_Arrival[T]] = deque()
        self._waking = False

    @asynccontextmanager
    async def slot(
        self, item: T, lengths: Callable[[], CachedLengths] | None = None, *, patient: bool = False
    ) -> AsyncIterator[None]:
        """Hold a slot. The next request is chosen after the block's first `await`. Raises QueueFullError, or if
        `patient` waits for room, first come first served."""
        if self.has_room:
            self.in_flight += 1
        else:
            await self._wait(_Arrival(item, lengths, asyncio.get_running_loop().create_future()), patient=patient)
        # The slot may be held for long, the item need not be kept for it.
        del item, lengths
        try:
            yield
        finally:
            self._release()

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.limit and not self.queue and not self._patient

    async def _wait(self, arrival: _Arrival[T], *, patient: bool) -> None:
        if not self._full:
            self._enter(arrival)
        elif patient:
            self._patient.append(arrival)
        else:
            raise QueueFullError(f"{len(self.queue)} requests are already waiting")
        try:
            await arrival.admitted
        except BaseException:
            self._withdraw(arrival)
            raise

    @property
    def _full(self) -> bool:
        return self.max_waiting is not None and len(self.queue) >= self.max_waiting

    def _enter(self, arrival: _Arrival[T]) -> None:
        arrival.ticket = self.queue.enter(arrival.item, arrival.lengths)
        self._admitted[arrival.ticket] = arrival.admitted

    def _withdraw(self, arrival: _Arrival[T]) -> None:
        if arrival.ticket is None:
            self._patient.remove(arrival)
        elif self._admitted.pop(arrival.ticket, None) is None:
            # Admitted just before it was cancelled.
            self._release()
        else:
            self.queue.leave(arrival.ticket)
            self._move_up()

    def _move_up(self) -> None:
        while self._patient and not self._full:
            self._enter(self._patient.popleft())

    def _release(self) -> None:
        self.in_flight -= 1
        if not self._waking:
            self._admit()

    def _admit(self) -> None:
        """Admit one request; the next is chosen once it has resumed and changed the cache."""
        self._waking = False
        while self.in_flight < self.limit and (self.queue or self._patient):
            if not self.queue:
                # The queue has no room at all (`max_waiting` 0).
                self._enter(self._patient.popleft())
            ticket = self.queue.take()
            self._move_up()
            if self._admitted[ticket].done():
                # Cancelled, but still in the queue.
                continue
            self.in_flight += 1
            self._admitted.pop(ticket).set_result(None)
            self._waking = True
            asyncio.get_running_loop().call_soon(self._admit)
            return
