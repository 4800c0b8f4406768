"""Shares of right answers, all in all and by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from ragorder.benchmarks.fusion.quality_positions.record import PositionsRecord
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, compare, wilson
from ragorder.eval.suites.quality.compare import mcnemar_exact

__all__ = ["Group", "Share", "bands", "by_place", "change", "definition_in_front", "mean", "swapped", "total"]

BANDS = 8
"""Places are taken together, so that there are no more of these."""

Group = RecordGroup[PositionsRecord]


@dataclass(frozen=True, slots=True)
class Share:
    """Right answers, of so many, with Wilson's 95 % interval."""

    right: int
    count: int

    @property
    def share(self) -> float | None:
        return self.right / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(self.right / self.count, self.count) if self.count else None


def total(group: Group, policy: str) -> Share:
    return _share(group, policy, lambda _: True)


def bands(group: Group) -> list[range]:
    """Places that are taken together, from 0."""
    documents = group.runs()[0].setting.documents
    several = -(-documents // BANDS)
    return [range(start, min(start + several, documents)) for start in range(0, documents, several)]


def by_place(group: Group, policy: str) -> list[Share]:
    """By the place of the document that the question names."""

    def within(band: range) -> Share:
        return _share(group, policy, lambda row: row["place"] in band)

    return [within(band) for band in bands(group)]


def definition_in_front(group: Group, policy: str, *, behind: bool = False) -> Share:
    """Chains whose definition stands in front of the link, or behind it."""
    return _share(group, policy, lambda row: (row["other_place"] > row["place"]) == behind)


def mean(group: Group, policy: str, column: str, of: str | None = None) -> float:
    """Over all requests; `of`: of the sum of another column."""
    values = [value for run in group.runs(policy) for value in run.rows[column]]
    return fmean(values) if of is None else sum(values) / sum(v for run in group.runs(policy) for v in run.rows[of])


def change(group: Group, policy: str, baseline: str) -> PairedDifference | None:
    """Of the share of right answers, in points, paired by question; None without the baseline."""
    pairs = list(_pairs(group, policy, baseline))
    try:
        return compare([_points(before) for before, _ in pairs], [_points(after) for _, after in pairs])
    except StatisticsError:
        return None


def swapped(group: Group, policy: str, baseline: str) -> tuple[int, int, float]:
    """Questions that the baseline alone answers, those that this policy alone answers, and McNemar's exact p-value."""
    pairs = [pair for before, after in _pairs(group, policy, baseline) for pair in zip(before, after, strict=True)]
    return mcnemar_exact([int(before) for before, _ in pairs], [int(after) for _, after in pairs])


def _pairs(group: Group, policy: str, baseline: str) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    theirs, ours = group.policies.get(baseline, {}), group.policies.get(policy, {})
    for seed in sorted(theirs.keys() & ours.keys()):
        yield theirs[seed].rows["right"], ours[seed].rows["right"]


def _points(right: Sequence[float]) -> list[float]:
    return [100 * each for each in right]


def _share(group: Group, policy: str, chosen: Callable[[dict[str, float]], bool]) -> Share:
    rows = [
        dict(zip(run.rows, values, strict=True))
        for run in group.runs(policy)
        for values in zip(*run.rows.values(), strict=True)
    ]
    right = [int(row["right"]) for row in rows if chosen(row)]
    return Share(sum(right), len(right))
