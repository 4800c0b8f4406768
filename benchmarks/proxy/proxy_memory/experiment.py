"""The peak memory of `ragorder serve` under attack: the suites of kind "proxy-memory"."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.proxy.proxy_load.load import ServerProcess, instant_server, proxy_server
from ragorder.benchmarks.proxy.proxy_load.upstream import allow_many_connections
from ragorder.benchmarks.proxy.proxy_memory.attacks import (
    ATTACKS,
    EVERYTHING,
    HELD,
    TEMPLATE,
    Target,
    attack,
    attack_with_everything,
)
from ragorder.eval.data.machine import load_average, peak_mb, resident_mb
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["ProxyMemory", "ProxyMemoryCell", "ProxyMemoryRecord", "attacked_proxy", "measure_peak"]

_NOTHING = "nothing"
_UPSTREAM = "ragorder.benchmarks.proxy.proxy_memory.upstream"

_LONGEST_S = 120.0


class ProxyMemoryCell(SuiteCell):
    """Each attack by this `share` of its clients; all together for so many `seconds`. A peak counts once it has not
    risen for `settled` seconds."""

    share: float = Field(1.0, gt=0, le=1)
    seconds: float = Field(90.0, ge=0)
    settled: float = Field(10.0, gt=0)


class ProxyMemoryRecord(Record):
    """The most memory, in MB, that a proxy of its own had under one attack (`peak_mb`), the clients, and under all
    attacks at once the steps that they did."""

    called: ClassVar[str] = "an attack"
    is_run: ClassVar[bool] = False

    type: Literal["proxy-memory"] = "proxy-memory"

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("peak_mb",)


class ProxyMemory(Experiment):
    kind = "proxy-memory"
    record = ProxyMemoryRecord
    cell = ProxyMemoryCell
    policies: ClassVar[Any] = (_NOTHING, *ATTACKS, EVERYTHING)
    packages: ClassVar[Any] = {"uvicorn": "proxy"}
    unit = "attacks"

    def obstacle(self, suite: Suite, cell: ProxyMemoryCell, policy: str) -> str | None:
        if resident_mb() is None:
            return "the peak memory of a process is read from /proc, which this system lacks"
        return super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: ProxyMemoryCell) -> int:
        return 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ProxyMemoryCell = job.cell
        load = load_average()
        for policy in job.policies:
            with attacked_proxy() as proxy:
                rows = measure_peak(proxy, policy, cell)
            yield {"policy": policy, "load_average": load, "rows": rows}
            advance()


@contextmanager
def attacked_proxy() -> Iterator[ServerProcess]:
    """`ragorder serve`, with its defaults and a template, before a server one path of which never ends its answer."""
    options = ("--capacity-tokens", "100000", "--template", TEMPLATE)
    with instant_server(_UPSTREAM) as upstream, proxy_server(upstream.port, *options) as proxy:
        yield proxy


def measure_peak(proxy: ServerProcess, policy: str, cell: ProxyMemoryCell) -> dict[str, list[Any]]:
    """Figures of `ProxyMemoryRecord`. Raises OSError if the system allows too few open files, or the proxy ends."""
    allow_many_connections(HELD)
    clients, done = 0, 0
    with Target(proxy.port) as target:
        if policy in ATTACKS:
            chosen = ATTACKS[policy]
            clients = max(1, round(chosen.clients * cell.share))
            attack(target, chosen, clients)
        elif policy == EVERYTHING:
            done = attack_with_everything(target, cell.seconds)
        peak = _settled_peak(proxy.pid, cell.settled)
    return {"peak_mb": [peak], "clients": [clients], "steps": [done]}


def _settled_peak(process: int, settled_s: float) -> float:
    """The peak once it has not risen for so long, after two minutes at the latest."""
    began = rose = time.monotonic()
    peak = 0.0
    while (now := time.monotonic()) < min(rose + settled_s, began + _LONGEST_S):
        found = peak_mb(process)
        if found is None:
            raise OSError("the proxy has ended under attack")
        if found > peak:
            peak, rose = found, now
        time.sleep(0.1)
    return peak
