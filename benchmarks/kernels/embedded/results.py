"""Medians, ratios of times, and verdicts against the goals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragorder.benchmarks.kernels.embedded.cells import FUSED, NO_CACHE, NOTHING, PLAIN, EmbeddedCell
from ragorder.benchmarks.kernels.embedded.record import EmbeddedRecord
from ragorder.eval.report.statistics import PairedDifference, Statistic, compare, need_scipy

__all__ = ["BASELINES", "Clock", "Speedup", "judge", "median", "required", "values_of"]

BASELINES = {"cached": "0", "overhead": PLAIN, "tiers": NOTHING, "fused": NOTHING, "serving": NO_CACHE}

Clock = Literal["wall_ms", "cpu_ms"]

_TIMES_SHORTER = {"2": 1.5, "4": 3.5}
# FusionRAG: 2.66 to 9.39 times.
_FUSED_SHORTER = {0.0: 4.0, 0.15: 2.7}
_MOST_WORSE = 0.08


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times shorter an arm's time is, with its 95 % interval; whether the goal is met ("": there is none)."""

    ratio: float
    low: float
    high: float
    met: Literal["met", "not met", "not decided", ""]


def required(cell: EmbeddedCell, arm: str) -> float | None:
    """The goal: the least speed-up of an arm."""
    if cell.measure == "fused" and (cell.documents, cell.document_tokens, cell.batch) == (10, 200, 1):
        return _FUSED_SHORTER.get(FUSED.get(arm, 1.0))
    if (cell.documents, cell.document_tokens) != (5, 200):
        return None
    if cell.measure == "overhead":
        return 1 / (1 + _MOST_WORSE) if arm == NOTHING else None
    return _TIMES_SHORTER.get(arm) if cell.measure == "cached" else None


def values_of(lines: Sequence[EmbeddedRecord], name: str) -> list[list[float]]:
    """A column, seed by seed."""
    return [line.figures(name) for line in sorted(lines, key=lambda line: line.seed)]


def judge(
    baseline: Sequence[EmbeddedRecord],
    ours: Sequence[EmbeddedRecord],
    clock: Clock = "wall_ms",
    *,
    statistic: Statistic = "p50",
) -> Speedup:
    """Paired row by row. Raises StatisticsError for different seeds or rows."""
    columns = values_of(baseline, clock), values_of(ours, clock)
    found = compare(*columns, statistic=statistic, relative=True, better="lower")
    ratio, low, high = (_shorter(value) for value in (found.difference, found.high, found.low))
    least = required(ours[0].setting, ours[0].policy)
    return Speedup(ratio, low, high, "" if least is None else _met(found, ratio, low, least))


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """With its 95 % bootstrap interval."""
    import numpy as np

    stats = need_scipy()
    middle = float(np.median(values))
    if len(set(values)) < 2:
        return middle, middle, middle
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.median,
        n_resamples=2_000,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return middle, float(found.low), float(found.high)


def _shorter(difference: float) -> float:
    return 0.0 if difference == math.inf else 1 / max(1e-9, 1 + difference)


def _met(found: PairedDifference, ratio: float, low: float, least: float) -> Literal["met", "not met", "not decided"]:
    if ratio < least:
        return "not met"
    return "met" if found.known and low >= least else "not decided"
