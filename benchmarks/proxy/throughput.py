"""The proxy at ever higher rates of requests."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.common.processes import ServerProcess, started, tree_cpu_s
from ragorder.benchmarks.proxy.client import Connections, chat_body, instant_server, proxy_server
from ragorder.eval.report.declared import Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.tables import Entry
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_STARTED_S = 30.0
_BODIES = 200
# One request of these is sent past the proxy, too.
_PAST = 5
# A rate that comes back more slowly is one that the machine, or the proxy, does not reach.
_REACHED = 0.95
_LEAD_S = 0.2
_CONNECTIONS = 64
_INSIDE = "inside"
_COMMANDS = {
    "order": ("serve", "--capacity-tokens", "262144", "--block-size", "16"),
    "route": ("route", "--topic-secret", "the same in all processes"),
}


class ThroughputCell(SuiteCell):
    """A proxy of `workers` processes gets requests on 64 connections: `first` a second for `seconds`, then
    `growth` times that rate, up to `most`, until it adds more than `added_ms` to one request in a hundred."""

    workers: int = Field(1, ge=1)
    first: float = Field(100.0, gt=0)
    growth: float = Field(1.25, gt=1)
    most: float = Field(20_000.0, gt=0)
    seconds: float = Field(5.0, gt=0)
    added_ms: float = Field(15.0, gt=0)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.most < self.first:
            raise ValueError("most is the last rate: at least that of first")
        return self


def log_program() -> str | None:
    """The program, if there is one."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def log_server() -> Iterator[str]:
    """Its URL. Raises OSError if it does not start."""
    program = log_program()
    if program is None:
        raise OSError("there is no valkey-server or redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with started([program, *options], "stdout", stdout=subprocess.DEVNULL):
        _wait_for(port)
        yield f"redis://127.0.0.1:{port}/0"


def _wait_for(port: int) -> None:
    until = time.monotonic() + _STARTED_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def measure_rate(
    upstream: ServerProcess, proxy: ServerProcess, rate: float, seconds: float, seed: int, added_ms: float
) -> dict[str, Any]:
    """An entry of the rows. Requests are sent at even distances, however long the answers take."""
    before = tree_cpu_s(proxy.pid)
    came, direct, proxied = asyncio.run(_send(upstream, proxy, rate, seconds, seed))
    after = tree_cpu_s(proxy.pid)
    import numpy as np

    added = 1e3 * (np.array(proxied) - np.median(direct))
    p50, p99 = (round(float(np.quantile(added, quantile)), 3) for quantile in (0.5, 0.99))
    used = None if before is None or after is None else round(1e3 * (after - before) / len(proxied), 3)
    return {
        "asked": round(rate, 1),
        "came": round(came, 1),
        "added_p50_ms": p50,
        "added_p99_ms": p99,
        "cpu_ms": used,
        "holds": p99 <= added_ms and came >= _REACHED * rate,
    }


async def _send(
    upstream: ServerProcess, proxy: ServerProcess, rate: float, seconds: float, seed: int
) -> tuple[float, list[float], list[float]]:
    """Answers a second, and the seconds that they took past the proxy and through it."""
    rng = random.Random(seed)
    bodies = [chat_body(rng, tagged=True) for _ in range(_BODIES)]
    past, through = Connections(upstream.port), Connections(proxy.port, in_turn=True)
    # The system spreads these over the workers.
    await through.open(_CONNECTIONS)
    count = max(2 * _PAST, round(rate * seconds))
    start = time.perf_counter() + _LEAD_S
    asked: tuple[list[asyncio.Task[float]], list[asyncio.Task[float]]] = [], []
    for number in range(count):
        body = bodies[number % _BODIES]
        at = start + number / rate
        if number % _PAST == 0:
            asked[0].append(asyncio.create_task(past.time(body, at + 0.5 / rate)))
        asked[1].append(asyncio.create_task(through.time(body, at)))
    direct, proxied = [await asyncio.gather(*tasks) for tasks in asked]
    came = count / (time.perf_counter() - start)
    for each in (past, through):
        each.close()
    return came, direct, proxied


def _at_first(name: str) -> Callable[[Record], float | None]:
    """What finds a figure at the first rate."""
    return lambda run: run.rows[name][0]


def _at_best(name: str) -> Callable[[Record], float | None]:
    """What finds a figure at the highest rate that holds."""

    def find(run: Record) -> float | None:
        holding = [place for place, holds in enumerate(run.rows["holds"]) if holds]
        return run.rows[name][holding[-1]] or None if holding else None

    return find


def _held(row: Row) -> str | Entry:
    came = row.values(_at_best("came"))
    return Entry(format_number(median(came), 0), range_words(came) if len(came) > 1 else "") if came else "none"


def _added(at: Callable[[str], Callable[[Record], float | None]]) -> Callable[[Row], str]:
    def entry(row: Row) -> str:
        p50, p99 = (row.values(at(name)) for name in ("added_p50_ms", "added_p99_ms"))
        return f"{format_number(median(p50))} / {format_number(median(p99))}" if p50 else "–"

    return entry


class ProxyThroughput(Experiment):
    """Rows: for each rate requests a second as `asked` and as they `came`, times, and whether the rate `holds`."""

    kind = "proxy-throughput"
    cell = ThroughputCell
    columns = ("asked", "came", "added_p50_ms", "added_p99_ms", "cpu_ms", "holds")
    policies: ClassVar[Any] = (*_COMMANDS, _INSIDE)
    packages: ClassVar[Any] = {"numpy": "eval", "uvicorn": "proxy"}
    one_job = True
    unit = "rates"
    tables: ClassVar[Any] = [
        TableForm(
            "Rates",
            [
                Column("workers", lambda row: str(row.cell.workers)),
                policy_column("mode"),
                Column("held, requests/s", _held),
                Column("added there, p50 / p99, ms", _added(_at_best)),
                Column("at the first rate", _added(_at_first)),
                figure("CPU of a request, ms", _at_best("cpu_ms"), 2, over=median),
                figure("requests/s a core", _at_best("cpu_ms"), 0, over=lambda used: 1e3 / median(used)),
            ],
            "Held: the highest rate at which the proxy adds at most {cell.added_ms:g} ms to 99 of 100 requests; if it "
            "is the last one, the machine may have been at its end before the proxy was. The first rate is "
            "{cell.first:g} requests/s. Requests a second of one core: of the proxy's own processor time at the rate "
            "held. Median of {seeds} seeds, in brackets their range.",
            labels=2,
            by=(),
        )
    ]

    def obstacle(self, suite: Suite, cell: ThroughputCell, policy: str) -> str | None:
        if policy == _INSIDE and cell.workers > 1:
            return "the server that orders itself is one process"
        if _shares_orders(cell, policy) and log_program() is None:
            return "workers that order share their orders: install valkey-server or redis-server"
        return super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: ThroughputCell) -> int:
        return len(list(_rates(cell)))

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ThroughputCell = job.cell
        found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in job.policies}
        with ExitStack() as until_measured:
            upstream = until_measured.enter_context(instant_server())

            def start(policy: str) -> ServerProcess:
                if policy == _INSIDE:
                    return until_measured.enter_context(instant_server("--inside"))
                command, *usual = _COMMANDS[policy]
                options = [*usual, "--workers", str(cell.workers)]
                if _shares_orders(cell, policy):
                    options += ["--shared-orders", until_measured.enter_context(log_server())]
                return until_measured.enter_context(proxy_server(upstream.port, *options, command=command))

            proxies = {policy: start(policy) for policy in job.policies}
            for policy in job.policies:
                # What a process does at its first requests is not measured.
                measure_rate(upstream, proxies[policy], cell.first, min(1.0, cell.seconds), job.seed, cell.added_ms)
            for rate in _rates(cell):
                for policy in job.policies:
                    # At each rate the policies take turns, those that have held the one before.
                    if not found[policy] or found[policy][-1]["holds"]:
                        figures = measure_rate(upstream, proxies[policy], rate, cell.seconds, job.seed, cell.added_ms)
                        found[policy].append(figures)
                    advance()
        for policy, rates in found.items():
            columns = {name: [each[name] for each in rates] for name in rates[0]}
            yield {"policy": policy, "rows": columns}


def _shares_orders(cell: ThroughputCell, policy: str) -> bool:
    return policy == "order" and cell.workers > 1


def _rates(cell: ThroughputCell) -> Iterator[float]:
    rate = cell.first
    while rate <= cell.most:
        yield rate
        rate *= cell.growth
