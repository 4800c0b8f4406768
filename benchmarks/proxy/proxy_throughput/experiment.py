"""The proxy at ever higher rates of requests: the suites of kind "proxy-throughput"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

from ragorder.benchmarks.proxy.proxy_load.load import ServerProcess, instant_server, proxy_server
from ragorder.benchmarks.proxy.proxy_throughput.log_server import log_program, log_server
from ragorder.benchmarks.proxy.proxy_throughput.record import ThroughputCell, ThroughputRecord
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["ProxyThroughput"]

_COMMANDS = {
    "order": ("serve", "--capacity-tokens", "262144", "--block-size", "16"),
    "route": ("route", "--topic-secret", "the same in all processes"),
}


class ProxyThroughput(Experiment):
    kind = "proxy-throughput"
    record = ThroughputRecord
    cell = ThroughputCell
    policies: ClassVar[Any] = tuple(_COMMANDS)
    packages: ClassVar[Any] = {"numpy": "eval", "uvicorn": "proxy"}
    one_job = True
    unit = "rates"

    def obstacle(self, suite: Suite, cell: ThroughputCell, policy: str) -> str | None:
        if _shares_orders(cell, policy) and log_program() is None:
            return "workers that order share their orders: install valkey-server or redis-server"
        return super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: ThroughputCell) -> int:
        return len(list(_rates(cell)))

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.proxy.proxy_throughput.measuring import measure_rate

        cell: ThroughputCell = job.cell
        load = load_average()
        found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in job.policies}
        with ExitStack() as until_measured:
            upstream = until_measured.enter_context(instant_server())

            def start(policy: str) -> ServerProcess:
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
            yield {"policy": policy, "load_average": load, "rows": columns}


def _shares_orders(cell: ThroughputCell, policy: str) -> bool:
    return policy == "order" and cell.workers > 1


def _rates(cell: ThroughputCell) -> Iterator[float]:
    rate = cell.first
    while rate <= cell.most:
        yield rate
        rate *= cell.growth
