"""Searches of a database in partitions, most of which are read from a disk in each pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ragorder.benchmarks.doll.batching.line import Line, Served
from ragorder.benchmarks.doll.batching.settings import PARTITIONS

__all__ = ["Passes"]


class Passes:
    """Passes over all partitions, a load after another; `resident` of them take no time. `slowed`: times as long while
    something else uses the machine. `busy_s`: of all passes."""

    def __init__(self, load_s: float, resident: Callable[[], int], slowed: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._load_s = load_s
        self._resident = resident
        self._slowed = slowed
        # Of a pass without an end.
        self._place = 0

    async def search(self, batch: list[Served]) -> None:
        """One pass for a batch."""
        loop = asyncio.get_running_loop()
        for request in batch:
            request.search_s = loop.time()
        for _ in range(PARTITIONS - self._resident()):
            await self._load()
        for request in batch:
            request.found_s = loop.time()

    async def run(self, line: Line, found: Line) -> None:
        """A pass after another, each for all requests that wait."""
        while await line.any():
            batch = line.take(len(line))
            await self.search(batch)
            found.put(*batch)
        found.close()

    async def run_joined(self, line: Line, found: Line) -> None:
        """Requests join at the next partition, and have their results after all partitions, in whatever order."""
        loop = asyncio.get_running_loop()
        left: dict[Served, int] = {}
        while left or await line.any():
            for request in line.take(len(line)):
                request.search_s = loop.time()
                left[request] = PARTITIONS
            await self.advance()
            for request in list(left):
                left[request] -= 1
                if not left[request]:
                    del left[request]
                    request.found_s = loop.time()
                    found.put(request)
        found.close()

    async def advance(self) -> None:
        """The next partition, around and around."""
        if self._place >= self._resident():
            await self._load()
        self._place = (self._place + 1) % PARTITIONS

    async def _load(self) -> None:
        seconds = self._load_s * self._slowed()
        await asyncio.sleep(seconds)
        self.busy_s += seconds
