"""Measurements of one run in columns, one entry per request."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from ragorder.eval.data.machine import resident_mb

_SERVED, _FAILED = 1, 2


class Measures:
    """Columns of figures, allocated at once, a row for each request in the order sent."""

    def __init__(self, requests: int, *, tree_nodes: Callable[[], int | None]) -> None:
        self.requests = requests
        self.order_ns = _column("q", requests)
        self.prompt_tokens = _column("q", requests)
        self.cached_tokens = _column("q", requests)
        self.cached_documents = _column("q", requests)
        self.predicted_tokens = _column("q", requests)
        self.in_flight = _column("q", requests)
        self.number = _column("q", requests)
        self.build_ns = _column("q", requests)
        self.displacement = _column("d", requests)
        self.moved_share = _column("d", requests)
        self.reordered = _column("b", requests)
        self.reordered_cold = _column("b", requests)
        self.best_moved = _column("b", requests)
        self.ttft_s = _column("d", requests)
        self.total_s = _column("d", requests)
        self.tbt_s = _column("d", requests)
        self._state = bytearray(requests)
        self._tree_nodes = tree_nodes
        self._samples: list[tuple[float | None, int | None]] = []

    def sent(self, row: int, in_flight: int) -> None:
        self.in_flight[row] = in_flight
        if row + 1 in _ends(self.requests):
            self._samples.append((resident_mb(), self._tree_nodes()))

    def served(self, row: int) -> None:
        self._state[row] = _SERVED

    def failed(self, row: int) -> None:
        self._state[row] = _FAILED

    @property
    def failures(self) -> int:
        return self._state.count(_FAILED)

    def rows(self, start: int = 0) -> list[int]:
        return [row for row in range(start, self.requests) if self._state[row] == _SERVED]

    def tenths(self) -> dict[str, list[float | None]]:
        """Return for each tenth of the requests, in the order sent, the mean of those in flight when one was sent, and
        this process's memory and the tree's nodes when the last one was."""
        bounds = pairwise((0, *_ends(self.requests)))
        return {
            "in_flight": [round(fmean(self.in_flight[start:stop]), 2) for start, stop in bounds],
            "rss_mb": [memory for memory, _ in self._samples],
            "tree_nodes": [nodes for _, nodes in self._samples],
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def thread_times_us(times_ns: Sequence[int], *, intervals: int = 1) -> list[float]:
    """Times without the cost of reading the clock."""
    return [max(0, ns - intervals * _clock_ns()) / 1e3 for ns in times_ns]


@lru_cache
def _clock_ns() -> int:
    readings = [time.thread_time_ns() for _ in range(2_001)]
    return sorted(after - before for before, after in pairwise(readings))[1_000]


@lru_cache
def _ends(requests: int) -> tuple[int, ...]:
    return tuple(sorted({math.ceil(requests * part / 10) for part in range(1, 11)} - {0}))


def _column(typecode: str, rows: int) -> array:  # type: ignore[type-arg]
    return array(typecode, bytes(array(typecode).itemsize * rows))


Column = list[int | None] | list[float | None]


@dataclass(frozen=True, slots=True)
class Columns:
    """Figures of each request in the trace's order; None for one that failed, and for a column that the policy or
    engine does not have. `order_us` (ordering and confirming) and `build_us` are thread CPU time; `displacement` is the
    mean distance from the rank, in places, `moved_share` the share of documents not at theirs. `reordered`,
    `reordered_cold` (although nothing is cached) and `best_moved` (another document than the best one is first) are 0
    or 1."""

    prompt_tokens: Column
    cached_tokens: Column
    cached_documents: Column
    predicted_tokens: Column | None
    ttft_ms: Column | None
    order_us: Column
    build_us: Column | None
    displacement: Column
    moved_share: Column
    reordered: Column
    reordered_cold: Column
    best_moved: Column
    tbt_ms: Column | None = None
