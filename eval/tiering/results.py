"""What the measurements say: times compared, and whether they are as good as they must be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragorder.eval.statistics import Comparison, compare

__all__ = ["ARMS", "MOST_WORSE", "REQUIRED", "Verdict", "judge"]

ARMS = ("apc", "tiers")
"""vLLM's own prefix cache alone, and with tiers behind it."""

REQUIRED = 1.5
"""How many times shorter the mean time to the first token must be with tiers, where the working set fits the host."""

MOST_WORSE = 0.03
"""The share by which it may be longer at most, where the working set fits the device."""

Met = Literal["met", "not met", "not decided", ""]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Mean times to the first token in ms; `ratio` is how many times shorter tiers make it (below 1: longer), with its
    confidence interval. `met` says whether what is required of the cell holds ("": nothing is): "not decided" if the
    ratio is on the right side and its interval is not."""

    apc_ms: float
    tiers_ms: float
    ratio: float
    low: float
    high: float
    met: Met
    by_seed: tuple[float, ...]


def judge(tier: str, lines: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compare the lines (one for each seed and arm) of one cell, paired request by request, warm-up left out."""
    columns: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for line in sorted(lines, key=lambda line: line["seed"]):
        columns[line["policy"]].append(line["rows"]["ttft_ms"][line["warmup"] :])
    found = compare(columns["apc"], columns["tiers"], relative=True, better="lower")
    low, high = _faster(found.high), _faster(found.low)
    by_seed = tuple(map(_faster, found.by_seed))
    return Verdict(found.baseline, found.value, _faster(found.difference), low, high, _met(tier, found, low), by_seed)


def _faster(difference: float) -> float:
    """A relative difference of times as a ratio of speeds."""
    return 0.0 if math.isinf(difference) and difference > 0 else 1 / max(1e-9, 1 + difference)


def _met(tier: str, found: Comparison, low: float) -> Met:
    least = {"host": REQUIRED, "device": 1 / (1 + MOST_WORSE)}.get(tier)
    if least is None:
        return ""
    if _faster(found.difference) < least:
        return "not met"
    return "met" if low >= least else "not decided"
