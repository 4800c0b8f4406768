"""Groups of records that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, Summary, compare, summary
from ragorder.eval.report.words import cell_words
from ragorder.eval.running.record import Cell, Record, RunRecord, key_of

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

R = TypeVar("R", bound=Record)

_FIRST = ("workload", "corpus", "dataset")  # what a cell is called by


@dataclass(slots=True)
class RecordGroup(Generic[R]):
    """Records of one suite, cell and engine, by policy and seed.

    `varies` holds the parameters of the cell that differ between the groups of a suite.

    >>> (group,) = group_runs(results.of(RunRecord, "table-1"))
    >>> group.compare("free", "retrieval", CACHED).verdict
    'better'
    """

    cell: Cell
    engine: Mapping[str, Any]
    varies: Cell = field(default_factory=dict)
    policies: dict[str, dict[int, R]] = field(default_factory=dict)
    _compared: dict[tuple[str, str, str], PairedDifference | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return cell_words(self.varies)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for runs in self.policies.values() for seed in runs})

    @property
    def block_size(self) -> int:
        return int(self.engine.get("block_size") or 1)

    def has(self, *columns: str) -> bool:
        return any(all(run.column(name) is not None for name in columns) for run in self.runs())

    def runs(self, policy: str | None = None) -> list[R]:
        policies = self.policies.values() if policy is None else [self.policies.get(policy, {})]
        return [run for runs in policies for _, run in sorted(runs.items())]

    def pairs(self, baseline: str, policy: str) -> list[tuple[R, R]]:
        """Their records with the same seeds."""
        theirs, ours = self.policies.get(baseline, {}), self.policies.get(policy, {})
        return [(theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())]

    def values(self, policy: str, column: str) -> Floats:
        """The column of all seeds, one after another, without the warm-up."""
        import numpy as np

        columns = [found for run in self.runs(policy) if (found := run.column(column)) is not None]
        return np.concatenate(columns) if columns else np.empty(0)

    def summary(self, policy: str, column: str) -> Summary | None:
        return summary(self.values(policy, column))

    def value(self, policy: str, metric: Metric) -> float | None:
        return metric.value(self.runs(policy))

    def by_seed(self, policy: str, metric: Metric) -> list[float]:
        return [value for run in self.runs(policy) if (value := metric.value([run])) is not None]

    def compare(self, policy: str, baseline: str, metric: Metric) -> PairedDifference | None:
        """None without seeds, requests and figures in common."""
        key = (policy, baseline, metric.name)
        if key not in self._compared:
            self._compared[key] = self._compare(policy, baseline, metric) if policy != baseline else None
        return self._compared[key]

    def _compare(self, policy: str, baseline: str, metric: Metric) -> PairedDifference | None:
        columns = [(metric.columns(plain), metric.columns(changed)) for plain, changed in self.pairs(baseline, policy)]
        known = [(plain, changed) for plain, changed in columns if plain is not None and changed is not None]
        if not known:
            return None
        sides = [[side[0] for side in each] for each in zip(*known, strict=True)]
        shares = [[side[1] for side in each if side[1] is not None] for each in zip(*known, strict=True)]
        try:
            return compare(
                sides[0],
                sides[1],
                of=(shares[0], shares[1]) if shares[0] else None,
                statistic=metric.statistic,
                relative=metric.relative,
                better=metric.better,
            )
        except StatisticsError:
            return None


Group = RecordGroup[RunRecord]
"""Of served requests."""


def group_runs(runs: Sequence[R]) -> list[RecordGroup[R]]:
    """In the order written."""
    groups: dict[object, RecordGroup[R]] = {}
    for run in runs:
        # A capacity "5%" is another number of tokens in every seed: it is the cell that says what was meant.
        engine = {name: value for name, value in run.engine.items() if name != "capacity_tokens"}
        group = groups.setdefault((key_of(run.cell), key_of(engine)), RecordGroup(run.cell, run.engine))
        group.policies.setdefault(run.policy, {})[run.seed] = run
    found = list(groups.values())
    names = sorted(dict.fromkeys(name for group in found for name in group.cell), key=lambda name: name not in _FIRST)
    varying = [name for name in names if len({repr(group.cell.get(name)) for group in found}) > 1]
    engines = {key_of({"engine": group.engine.get("name"), "model": group.engine.get("model")}) for group in found}
    for group in found:
        group.varies = {name: group.cell.get(name) for name in varying}
        if len(engines) > 1:
            group.varies = {
                **group.varies,
                "engine": group.engine.get("name"),
                "model": group.engine.get("model") or "",
            }
    return found
