"""Generation in batches that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ragorder.benchmarks.doll.batching.line import Line, Served
from ragorder.benchmarks.doll.batching.sizes import Sizes

__all__ = ["Batches", "Moment"]


class Moment(NamedTuple):
    """The beginning of a batch, or a step that requests join: the time, requests that run and that wait behind it, the
    share of KV on the device, and partitions that may be resident."""

    at_s: float
    batch: int
    waiting: int
    device_kv: float
    resident: int


class Batches:
    """Generates for batches whose time `seconds` gives by size. `moment` describes one for the trace: (share of KV on
    the device, partitions). `running`: requests of the present batch."""

    def __init__(
        self, seconds: Callable[[int], float], sizes: Sizes, moment: Callable[[int], tuple[float, int]]
    ) -> None:
        self.busy_s = 0.0
        self.running = 0
        self.batch = 1
        self.trace: list[Moment] = []
        self._seconds = seconds
        self._sizes = sizes
        self._moment = moment

    async def generate(self, batch: list[Served], waiting: int) -> None:
        loop = asyncio.get_running_loop()
        self.running = self.batch = len(batch)
        self.trace.append(Moment(loop.time(), len(batch), waiting, *self._moment(len(batch))))
        seconds = self._seconds(len(batch))
        for request in batch:
            request.begun_s = loop.time()
        await asyncio.sleep(seconds)
        for request in batch:
            request.ended_s = loop.time()
        self.busy_s += seconds
        self.running = 0

    async def next_batch(self, line: Line) -> list[Served]:
        """Empty after the last one."""
        loop = asyncio.get_running_loop()
        while await line.any():
            batch = line.take(self._sizes.next(len(line), loop.time(), last=line.closed))
            if batch:
                return batch
            await line.changed()
        return []

    async def run(self, line: Line) -> None:
        while batch := await self.next_batch(line):
            began_s = asyncio.get_running_loop().time()
            await self.generate(batch, len(line))
            self.learn(len(batch), asyncio.get_running_loop().time() - began_s)

    def learn(self, size: int, seconds: float) -> None:
        self._sizes.learn(size, seconds)
