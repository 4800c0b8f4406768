"""Exact match by arm and ratio, normalised and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ragorder.benchmarks.fusion.fusion.arms import BASELINE, REUSE
from ragorder.benchmarks.fusion.fusion.record import FusionRecord
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, compare

__all__ = ["ENOUGH", "Curve", "curve", "removed_at_the_end", "removed_deviation"]

ENOUGH = 0.95
"""Of the way from full reuse to full attention."""

_DEVIATION = "deviation"
_LEAST_GAP = 0.1

Group = RecordGroup[FusionRecord]


@dataclass(frozen=True, slots=True)
class Curve:
    """Exact match (0 to 1) of an arm at each ratio; `exact`: the share of the documents in an exact prefix."""

    ratios: Sequence[float]
    right: Sequence[float]
    exact: float
    _group: Group
    _arm: str

    def at(self, ratio: float) -> float | None:
        return dict(zip(self.ratios, self.right, strict=True)).get(ratio)

    def computed(self, ratio: float) -> float:
        """The share of the documents' tokens that a request computes, if its exact prefix was there."""
        return ratio * (1 - self.exact)

    def normalised(self, ratio: float) -> float | None:
        """Equation 11 of FusionRAG: 0 is full reuse, 1 full attention. None if one of them was not measured, or
        full attention answers hardly more."""
        full, reuse, ours = curve(self._group, BASELINE), curve(self._group, REUSE), self.at(ratio)
        if full is None or reuse is None or ours is None:
            return None
        if full.right[0] - reuse.right[0] < _LEAST_GAP:
            return None
        return (ours - reuse.right[0]) / (full.right[0] - reuse.right[0])

    def enough(self) -> float | None:
        """The least ratio from which on answers are nearly those of full attention."""
        found = None
        for ratio in sorted(self.ratios, reverse=True):
            share = self.normalised(ratio)
            if share is None or share < ENOUGH:
                break
            found = ratio
        return found

    def against(self, other: str, ratio: float) -> PairedDifference | None:
        """Paired question by question with another arm at the same ratio, or at the only one that it has."""
        pairs = [
            (theirs[seed], ours[seed])
            for theirs, ours in [(self._group.policies.get(other, {}), self._group.policies[self._arm])]
            for seed in sorted(theirs.keys() & ours.keys())
        ]
        columns = [(_answers(base, ratio), _answers(mine, ratio)) for base, mine in pairs]
        try:
            return compare([base for base, _ in columns], [mine for _, mine in columns]) if columns else None
        except StatisticsError:
            return None


def curve(group: Group, arm: str) -> Curve | None:
    """None if the arm was not measured."""
    lines = group.runs(arm)
    if not lines:
        return None
    ratios = lines[0].ratios
    right = [fmean(value for line in lines for value in _answers(line, ratio)) for ratio in ratios]
    return Curve(ratios, right, float(lines[0].facts["exact"]), group, arm)


def removed_deviation(group: Group, plain: str, changed: str) -> float | None:
    """The share of the second layer's KV deviation in full reuse that other copies do not have."""
    columns = [
        [line.rows[_DEVIATION] for line in group.runs(arm) if _DEVIATION in line.rows] for arm in (plain, changed)
    ]
    if not all(columns):
        return None
    before, after = (sum(map(sum, each)) for each in columns)
    return 1 - after / before if before else None


def removed_at_the_end(group: Group, plain: str, changed: str, share: float = 0.25) -> float | None:
    """The same of the last `share` of the prompts' tokens."""
    columns = [
        [line.facts[_DEVIATION] for line in group.runs(arm) if _DEVIATION in line.facts] for arm in (plain, changed)
    ]
    if not all(columns):
        return None
    before, after = (sum(sum(each[round((1 - share) * len(each)) :]) for each in arm) for arm in columns)
    return 1 - after / before if before else None


def _answers(line: FusionRecord, ratio: float) -> list[float]:
    ratios = line.ratios
    return line.rows[f"{ratio if len(ratios) > 1 else ratios[0]:g}"]
