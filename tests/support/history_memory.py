"""Memory of what an orderer remembers, over many requests: `python -m support.history_memory [REQUESTS]`.

Every fifth of ten documents is new, so that documents, paths and remembered requests are replaced all the time.
"""

from __future__ import annotations

import gc
import sys
import time
from itertools import count
from random import Random
from statistics import median

import click

from ragorder import Orderer

_LINES = 10


def main(requests: int) -> None:
    orderer = Orderer(key=lambda number: number, tokens=lambda number: 200, capacity_tokens=100_000, strict=True)
    draw, new = Random(0), count(10_000)
    click.echo("requests | resident MiB | order p50, µs")
    times: list[float] = []
    for number in range(1, requests + 1):
        documents = [next(new) if place % 5 == 4 else int(draw.paretovariate(0.6)) % 10_000 for place in range(10)]
        before = time.perf_counter()
        ordering = orderer.order(list(dict.fromkeys(documents)))
        times.append(time.perf_counter() - before)
        ordering.confirm()
        if number % (requests // _LINES) == 0:
            gc.collect()
            click.echo(f"{number:,} | {_resident_mib():.1f} | {1e6 * median(times):.0f}")
            times.clear()


def _resident_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
