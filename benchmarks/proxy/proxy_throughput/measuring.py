"""One rate of requests, through the proxy and past it."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np

from ragorder.benchmarks.proxy.proxy_load.load import Connections, ServerProcess, chat_body
from ragorder.eval.data.machine import tree_cpu_s

__all__ = ["measure_rate"]

_BODIES = 200
# Of so many requests one is sent past the proxy, too.
_PAST = 5
# A rate that comes back more slowly is one that the machine, or the proxy, does not reach.
_REACHED = 0.95
_LEAD_S = 0.2
_CONNECTIONS = 64


def measure_rate(
    upstream: ServerProcess, proxy: ServerProcess, rate: float, seconds: float, seed: int, added_ms: float
) -> dict[str, Any]:
    """Figures of `ThroughputRecord`. Requests are sent at even distances, however long the answers take."""
    before = tree_cpu_s(proxy.pid)
    came, direct, proxied = asyncio.run(_send(upstream, proxy, rate, seconds, seed))
    after = tree_cpu_s(proxy.pid)
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
    # Among so many the system spreads the workers.
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
