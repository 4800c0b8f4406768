"""Results of the measurements: medians, ratios, and verdicts against the goals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragorder.eval.experiments.embedded.prefill import NOTHING, PLAIN
from ragorder.eval.report.statistics import PairedDifference, Statistic, compare, need_scipy

__all__ = ["BASELINES", "Clock", "Verdict", "judge", "median", "required", "values_of"]

BASELINES = {"cached": "0", "overhead": PLAIN, "tiers": NOTHING, "serving": "no cache"}
"""What the arms of a measure are compared with."""

Clock = Literal["wall_ms", "cpu_ms"]
Line = Mapping[str, Any]

_LAYOUT = {"documents": 5, "document_tokens": 200}
_TIMES_SHORTER = {"2": 1.5, "4": 3.5}
_MOST_WORSE = 0.08


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio` is how many times shorter the arm's time is than the baseline's (below 1: longer), with its 95 %
    interval. `met` says whether what is required holds ("": nothing is): "not decided" if the ratio is on the right
    side and its interval is not."""

    ratio: float
    low: float
    high: float
    met: Literal["met", "not met", "not decided", ""]


def required(cell: Line, arm: str) -> float | None:
    """How many times shorter than its baseline an arm of a measure must be at least; None: nothing is required."""
    if any(cell.get(name) != value for name, value in _LAYOUT.items()):
        return None
    if cell["measure"] == "overhead":
        return 1 / (1 + _MOST_WORSE) if arm == NOTHING else None
    return _TIMES_SHORTER.get(arm) if cell["measure"] == "cached" else None


def values_of(lines: Sequence[Line], name: str) -> list[list[float]]:
    """A column of one arm's lines, seed by seed, without the warm-up."""
    return [line["rows"][name][line["warmup"] :] for line in sorted(lines, key=lambda line: int(line["seed"]))]


def judge(
    baseline: Sequence[Line], ours: Sequence[Line], clock: Clock = "wall_ms", *, statistic: Statistic = "p50"
) -> Verdict:
    """Two arms, one line a seed, paired row by row. Raises ImportError naming the extra to install."""
    columns = values_of(baseline, clock), values_of(ours, clock)
    found = compare(*columns, statistic=statistic, relative=True, better="lower")
    ratio, low, high = (_shorter(value) for value in (found.difference, found.high, found.low))
    least = required(ours[0]["cell"], ours[0]["policy"])
    return Verdict(ratio, low, high, "" if least is None else _met(found, ratio, low, least))


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """With its 95 % bootstrap interval. Raises ImportError naming the extra to install."""
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
    """A relative difference of times as a ratio of speeds."""
    return 0.0 if difference == math.inf else 1 / max(1e-9, 1 + difference)


def _met(found: PairedDifference, ratio: float, low: float, least: float) -> Literal["met", "not met", "not decided"]:
    if ratio < least:
        return "not met"
    return "met" if found.known and low >= least else "not decided"
