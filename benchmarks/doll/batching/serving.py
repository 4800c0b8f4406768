"""Requests served by one system on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder.benchmarks.doll.batching.decoupled import Decoupled
from ragorder.benchmarks.doll.batching.generation import Batches
from ragorder.benchmarks.doll.batching.joining import Joining, KeptKV
from ragorder.benchmarks.doll.batching.line import Line, Served
from ragorder.benchmarks.doll.batching.prompts import Prompts
from ragorder.benchmarks.doll.batching.record import BatchingCell
from ragorder.benchmarks.doll.batching.retrieval import Passes
from ragorder.benchmarks.doll.batching.settings import SETTINGS, TOP_K, Generator, Setting
from ragorder.benchmarks.doll.batching.sizes import SIZES, BacklogSizes, FixedSizes, RateSizes, Sizes
from ragorder.benchmarks.doll.batching.systems import System
from ragorder.eval.data.arrivals import ArrivalStep
from ragorder.eval.virtual.engine import VirtualEngine

__all__ = ["rates", "serve"]


def rates(steps: Sequence[ArrivalStep]) -> Callable[[float], float]:
    """Requests a minute at a time; after the last step as in it."""

    def rate(now_s: float) -> float:
        for step in steps:
            now_s -= step.seconds
            if now_s < 0:
                break
        return 60 * step.requests / step.seconds

    return rate


async def serve(
    system: System, cell: BatchingCell, at_s: Sequence[float], steps: Sequence[ArrivalStep], prompts: Prompts | None
) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times. To be run on a virtual loop. `prompts`: for systems
    that keep KV.

    Facts: seconds until all are answered, and those that searches and generation were busy; the `trace` of batches, or
    of steps that requests join; prompt tokens, and those computed, where KV is kept.
    """
    run = _Run(system, cell, steps, prompts, len(at_s))
    requests = [Served(number, at) for number, at in enumerate(at_s)]
    loop = asyncio.get_running_loop()

    async def arrive() -> None:
        for request in requests:
            await asyncio.sleep(max(0.0, request.at_s - loop.time()))
            run.line.put(request)
        run.line.close()

    await (run.product.serve(requests) if run.product is not None else asyncio.gather(arrive(), *run.workers()))
    return {"rows": _rows(requests), "facts": {"total_s": loop.time(), **run.facts()}}


class _Run:
    def __init__(
        self,
        system: System,
        cell: BatchingCell,
        steps: Sequence[ArrivalStep],
        prompts: Prompts | None,
        requests: int,
    ) -> None:
        self.line = Line()
        self._found = Line()
        self._system = system
        self._cell = cell
        self._setting: Setting = SETTINGS[cell.setting]
        self._passes = Passes(self._setting.load_s(cell.index), self._resident, self._slowed)
        self.product: Decoupled | None = None
        self._kept: KeptKV | VirtualEngine[Any] | None = None
        self._generation: Batches | Joining | Decoupled
        generator = self._generator()
        request_s = generator.request_s * cell.top_k / TOP_K
        capacity = None
        if system.kept:
            assert prompts is not None, "systems that keep KV need prompts"
            capacity = round(generator.most * prompts.mean_tokens)
        if system.server:
            self.product = self._generation = Decoupled(
                self._passes,
                prompts or Prompts.none(requests),
                generator,
                self._seconds,
                # How many may join is limited by their KV.
                BacklogSizes(self._seconds, 4 * generator.most, (*SIZES, 4 * generator.most)).batcher
                if system.joined
                else BacklogSizes(self._seconds, generator.most).batcher,
                self._moment,
                capacity_tokens=capacity,
                request_s=request_s,
                joined_passes=system.passes,
            )
            self._kept = self.product.kept
        elif system.joined:
            kept = None
            if capacity is not None and prompts is not None:
                kept = self._kept = KeptKV(prompts, capacity, ordered=system.kept == "ordered")
            self._generation = Joining(generator, kept, self._moment, request_s)
        else:
            self._generation = Batches(self._seconds, self._sizes(generator, rates(steps)), self._moment)

    def workers(self) -> list[Any]:
        """Of what is not the product's own server."""
        assert not isinstance(self._generation, Decoupled), "it has workers of its own"
        if self._system.serial:
            return [self._serial()]
        search = self._passes.run_joined if self._system.passes else self._passes.run
        return [search(self.line, self._found), self._generation.run(self._found)]

    def facts(self) -> dict[str, Any]:
        kept = self._kept
        tokens = {} if kept is None else {"prompt_tokens": kept.prompt_tokens, "computed_tokens": kept.computed_tokens}
        return {
            "searching_s": self._passes.busy_s,
            "generating_s": self._generation.busy_s,
            "trace": [
                [round(each.at_s, 1), each.batch, each.waiting, round(each.device_kv, 3), each.resident]
                for each in self._generation.trace
            ],
            **tokens,
        }

    async def _serial(self) -> None:
        assert isinstance(self._generation, Batches), "requests join where generation has a worker of its own"
        loop = asyncio.get_running_loop()
        while batch := await self._generation.next_batch(self.line):
            waiting, began_s = len(self.line), loop.time()
            await self._passes.search(batch)
            await self._generation.generate(batch, waiting)
            self._generation.learn(len(batch), loop.time() - began_s)

    def _generator(self) -> Generator:
        system, cell, setting = self._system, self._cell, self._setting
        found = setting.generator(system.engine, top_k=cell.top_k)
        most = found.most
        if system.serial and system.engine == "prefetch":
            most = setting.serial_most * TOP_K // cell.top_k if setting.kv_bound else setting.serial_most
        base_s = found.base_s if cell.weights is None else found.base_s * (1 - cell.weights) / setting.streamed
        return Generator(base_s, found.request_s, max(1, cell.batch or most))

    def _seconds(self, batch: int) -> float:
        seconds = self._generator().seconds(batch, top_k=self._cell.top_k)
        depth = self._system.depth
        return seconds if depth is None else seconds * self._setting.prefetch_factor(batch, depth)

    def _sizes(self, generator: Generator, rate: Callable[[float], float]) -> Sizes:
        if self._cell.batch is not None:
            return FixedSizes(self._cell.batch)
        if self._system.sizes == "rate":
            return RateSizes(rate, generator.most)
        if self._system.sizes == "fixed":
            return FixedSizes(min(self._setting.fixed, generator.most))
        if not self._system.serial:
            return BacklogSizes(self._seconds, generator.most)
        pass_s = self._setting.pass_s
        return BacklogSizes(lambda batch: pass_s + self._seconds(batch), generator.most)

    def _resident(self) -> int:
        if self._cell.resident is not None:
            return self._cell.resident
        return self._moment(self._generation.batch)[1]

    def _slowed(self) -> float:
        return self._setting.disturbed if self._generation.running else 1.0

    def _moment(self, batch: int) -> tuple[float, int]:
        """KV on the device, and partitions for which there is memory."""
        cell, setting = self._cell, self._setting
        resident = setting.resident(batch, cell.index, top_k=cell.top_k) if self._system.placed else 0
        return setting.device_kv_share(batch, top_k=cell.top_k), resident


def _rows(requests: Sequence[Served]) -> dict[str, list[float]]:
    return {
        "at_s": [round(each.at_s, 1) for each in requests],
        "waiting_s": [round(each.waiting_s, 1) for each in requests],
        "retrieval_s": [round(each.found_s - each.search_s, 1) for each in requests],
        "generation_s": [round(each.ended_s - each.begun_s, 1) for each in requests],
        "latency_s": [round(each.ended_s - each.at_s, 1) for each in requests],
    }
