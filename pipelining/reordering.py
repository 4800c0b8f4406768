"""Cache-aware reordering (RAGCache section 5.2): a queue in front of a busy engine, whose cache decides who is next."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

__all__ = ["CacheAwareQueue", "CachedLengths", "ConcurrencyLimiter", "QueueFullError", "Ticket"]

T = TypeVar("T")

_logger = logging.getLogger("ragorder")


class CachedLengths(NamedTuple):
    """Of a request's prompt, the tokens that the engine would find in its cache, and those that it would compute."""

    cached_tokens: float
    computed_tokens: float

    @property
    def priority(self) -> float:
        """OrderPriority of RAGCache section 5.2."""
        return self.cached_tokens / max(1.0, self.computed_tokens)


class QueueFullError(Exception):
    """So many requests wait already that this one is not to wait as well."""


class Ticket(Generic[T]):
    """An `item` that waits. `overtaken`: by how many later ones so far."""

    __slots__ = ("_lengths", "_number", "_priority", "item", "overtaken")

    def __init__(self, item: T, lengths: Callable[[], CachedLengths] | None, number: int) -> None:
        self.item = item
        self.overtaken = 0
        self._lengths = lengths
        self._number = number
        self._priority = 0.0


class CacheAwareQueue(Generic[T]):
    """Gives the item with the largest cached length / computation length next; of equal ones the one that came first.

    Nobody is overtaken by more than `window` items that came later: the oldest one goes next once it has been overtaken
    by so many. So an item is taken at most `window` places behind the place at which it came, whatever comes after it
    and whoever sent that: between tenants the queue is fair as first come, first served is, to within the window.
    `window` 0 is first come, first served.

    The lengths change while an item waits: those of the oldest `window` + 1 items are asked for whenever one is taken,
    which is all that taking one costs, however many wait; items behind those are not candidates yet. An item without
    lengths, or whose lengths cannot be had, counts as not cached. `largest_overtaking` is the most that has happened to
    anybody. Not for several threads at a time.

    Raises ValueError for a negative window.
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

    def enter(self, item: T, lengths: Callable[[], CachedLengths] | None = None) -> Ticket[T]:
        """Wait at the end of the queue."""
        self._entered += 1
        ticket = self._waiting[self._entered] = Ticket(item, lengths, self._entered)
        return ticket

    def leave(self, ticket: Ticket[T]) -> None:
        """Wait no longer. Nothing happens to one that was taken."""
        self._waiting.pop(ticket._number, None)

    def take(self) -> Ticket[T]:
        """The next item's ticket. Raises IndexError if nobody waits."""
        if not self._waiting:
            raise IndexError("nobody waits in this queue")
        candidates = list(islice(self._waiting.values(), self.window + 1))
        chosen = candidates[0]
        if len(candidates) > 1 and chosen.overtaken < self.window:
            for ticket in candidates:
                ticket._priority = self._priority_of(ticket)
            # The first of equal ones, which is the oldest.
            chosen = max(candidates, key=attrgetter("_priority"))
        for ticket in candidates:
            if ticket is chosen:
                break
            ticket.overtaken += 1
        self.largest_overtaking = max(self.largest_overtaking, candidates[0].overtaken)
        del self._waiting[chosen._number]
        return chosen

    def upcoming(self, count: int) -> list[T]:
        """The items, so many at most, that will probably be taken next: of the candidates those with the highest
        priorities, as of when somebody was last chosen."""
        candidates = islice(self._waiting.values(), self.window + 1)
        return [ticket.item for ticket in nlargest(count, candidates, key=attrgetter("_priority"))]

    def _priority_of(self, ticket: Ticket[T]) -> float:
        if ticket._lengths is None:
            return 0.0
        try:
            return ticket._lengths().priority
        except Exception as error:
            if not self._failed:
                self._failed = True
                _logger.warning("a request counts as not cached: %s; later ones are not told", type(error).__name__)
            return 0.0


class ConcurrencyLimiter(Generic[T]):
    """Lets at most `limit` requests through at a time; the others wait in the `queue`, which nobody else fills, at most
    `max_waiting` of them (None: no bound). For one event loop.

        async with limiter.slot(request, lengths):
            ...  # order the documents, send the request, read the answer to its end

    A request that is slow takes one of the places, and no more. One that is cancelled while it waits leaves the queue.

    Raises ValueError for a `limit` of less than one, or a negative `max_waiting`.
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
        self._places: dict[Ticket[T], asyncio.Future[None]] = {}
        self._waking = False

    @asynccontextmanager
    async def slot(self, item: T, lengths: Callable[[], CachedLengths] | None = None) -> AsyncIterator[None]:
        """Wait for a place, and hold it until the block ends. What is done in the block before its first `await` is
        done before the next one is chosen. Raises QueueFullError if there is no room to wait."""
        if self.in_flight < self.limit and not self.queue:
            self.in_flight += 1
        else:
            await self._wait(item, lengths)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, item: T, lengths: Callable[[], CachedLengths] | None) -> None:
        if self.max_waiting is not None and len(self.queue) >= self.max_waiting:
            raise QueueFullError(f"{len(self.queue)} requests wait already")
        ticket = self.queue.enter(item, lengths)
        place = self._places[ticket] = asyncio.get_running_loop().create_future()
        try:
            await place
        except BaseException:
            if self._places.pop(ticket, None) is not None:
                self.queue.leave(ticket)
            else:
                # It was let through at the very moment at which it gave up.
                self._release()
            raise

    def _release(self) -> None:
        self.in_flight -= 1
        if not self._waking:
            self._admit()

    def _admit(self) -> None:
        """Let one through, and then, if there are more places, the next one: each wakes up before another is chosen,
        and puts into the cache what that choice is to see."""
        self._waking = False
        while self.queue and self.in_flight < self.limit:
            ticket = self.queue.take()
            if self._places[ticket].done():
                # Cancelled, and not yet awake to leave.
                continue
            self.in_flight += 1
            self._places.pop(ticket).set_result(None)
            self._waking = True
            asyncio.get_running_loop().call_soon(self._admit)
            return
