"""Latency that the proxy adds, and many streams at a time: the suites of kind "proxy-load"."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.proxy.proxy_load.load import measure_latency, run_streams, servers
from ragorder.benchmarks.proxy.proxy_load.upstream import allow_many_connections
from ragorder.eval.data.machine import load_average, peak_mb
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record, as_column
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["ProxyLoad", "ProxyLoadCell", "ProxyLoadRecord"]


class ProxyLoadCell(SuiteCell):
    """`rate` requests a second for so many `seconds`; then `streams` at a time, each of so many `events`, with `pause`
    seconds between them."""

    rate: float = Field(50.0, ge=1)
    seconds: float = Field(20.0, ge=0)
    streams: int = Field(2000, ge=0)
    events: int = Field(20, ge=1)
    pause: float = Field(0.25, ge=0)


class ProxyLoadRecord(Record):
    """One side, `direct` or `proxied`; the requests of both are pairs. `facts`: number of streams, how many came whole,
    the seconds that they took, and the most memory of the side's server in MB."""

    type: Literal["proxy-load"] = "proxy-load"

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        as_column(self.rows["latency_ms"])
        return self

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "latency_ms", "tagged"

    @property
    def requests(self) -> int:
        return len(self.rows["latency_ms"])


class ProxyLoad(Experiment):
    kind = "proxy-load"
    record = ProxyLoadRecord
    cell = ProxyLoadCell
    policies: ClassVar[Any] = ("direct", "proxied")
    one_job = True
    unit = "sides"

    def asked(self, suite: Suite) -> Sequence[str]:
        """Both sides: they are compared pair by pair."""
        return suite.policies

    def requests(self, suite: Suite, cell: ProxyLoadCell) -> int:
        asked = round(cell.rate * cell.seconds)
        return min(asked, self.options.limit or asked)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ProxyLoadCell = job.cell
        allow_many_connections(cell.streams)
        # Those of the latencies are still open.
        connections = str(max(1024, cell.streams + 256))
        started = servers("--max-connections", connections)
        sides = self.kept(connections, lambda: self.resources.enter_context(started))
        load = load_average()
        seconds = job.requests / cell.rate
        direct, proxied = (side.port for side in sides)
        pairs = asyncio.run(measure_latency(direct, proxied, cell.rate, seconds, job.seed)) if seconds else []
        for policy, server in zip(self.policies, sides, strict=True):
            began = time.perf_counter()
            whole = asyncio.run(run_streams(server.port, cell.streams, cell.events, cell.pause))
            if policy in job.policies:
                side = 2 if policy == "proxied" else 1
                yield {
                    "policy": policy,
                    "load_average": load,
                    "rows": {
                        "tagged": [pair[0] for pair in pairs],
                        "latency_ms": [round(pair[side], 4) for pair in pairs],
                    },
                    "facts": {
                        "streams": len(whole),
                        "whole": sum(whole),
                        "streams_s": round(time.perf_counter() - began, 3),
                        "peak_mb": peak_mb(server.pid),
                    },
                }
            advance()
