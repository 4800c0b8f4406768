"""Requests that wait for a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

__all__ = ["Line", "Served"]


@dataclass(eq=False, slots=True)
class Served:
    """A request and its times, in seconds of the virtual clock."""

    number: int
    at_s: float
    search_s: float = 0.0
    found_s: float = 0.0
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def waiting_s(self) -> float:
        return self.search_s - self.at_s + self.begun_s - self.found_s


class Line:
    """First come, first served. `close`: no other will come."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: deque[Served] = deque()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, *requests: Served) -> None:
        self._waiting.extend(requests)
        self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    def take(self, count: int) -> list[Served]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    async def changed(self) -> None:
        """Until a request comes, or the last one has come."""
        self._changed.clear()
        await self._changed.wait()

    async def any(self) -> bool:
        """Wait for one request; False: none will come."""
        while not self._waiting and not self.closed:
            await self.changed()
        return bool(self._waiting)
