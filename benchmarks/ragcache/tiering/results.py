"""Paired times to the first token, and verdicts against the goals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragorder.eval.report.statistics import PairedDifference, compare

if TYPE_CHECKING:
    from ragorder.eval.report.statistics import Floats

__all__ = ["ARMS", "GOALS", "MOST_WORSE", "REQUIRED", "TierVerdict", "judge"]

ARMS = ("apc", "tiers")
"""vLLM's prefix cache alone, and with tiers."""

REQUIRED = 1.5
"""The least speed-up of the mean time to the first token, where the working set fits the host."""

MOST_WORSE = 0.03
"""The largest slow-down, where the working set fits the device."""

GOALS = {"host": REQUIRED, "device": 1 / (1 + MOST_WORSE)}

Met = Literal["met", "not met", "not decided", ""]


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """`ratio` is the speed-up by tiers with its interval (0 to inf: too few requests). `met` ("": no goal) is "not
    decided" if the ratio reaches the goal and its interval does not."""

    apc_ms: float
    tiers_ms: float
    ratio: float
    low: float
    high: float
    met: Met
    by_seed: tuple[float, ...]

    @property
    def known(self) -> bool:
        return self.low > 0 and math.isfinite(self.high)


def judge(room: str, apc: Sequence[Sequence[float] | Floats], tiers: Sequence[Sequence[float] | Floats]) -> TierVerdict:
    """Compare both arms' times to the first token (a sequence a seed), paired request by request. Raises
    StatisticsError for different seeds or requests."""
    found = compare(apc, tiers, relative=True, better="lower")
    low, high = _faster(found.high), _faster(found.low)
    by_seed = tuple(map(_faster, found.by_seed))
    return TierVerdict(
        found.baseline, found.value, _faster(found.difference), low, high, _met(room, found, low), by_seed
    )


def _faster(difference: float) -> float:
    """A relative difference of times as a ratio of speeds."""
    return math.inf if difference <= -1 else 1 / (1 + difference)


def _met(room: str, found: PairedDifference, low: float) -> Met:
    least = GOALS.get(room)
    if least is None:
        return ""
    if _faster(found.difference) < least:
        return "not met"
    return "met" if low >= least else "not decided"
