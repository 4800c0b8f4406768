"""Figures of runs of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, Literal, Self

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.declared import Column
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines, from_zero
from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.statistics import PairedDifference, Statistic, compare, compare_seeds
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Suite

MEAN = Metric("mean latency", "latency_ms", "ms", relative=True, better="lower")
Cells = list[tuple[Any, RecordGroup[Any]]]
"""Cells that differ in one parameter, with their records."""


def cells_along(parameter: str, experiment: type[Experiment], suite: Suite, results: Results) -> list[Cells]:
    """Return the cells that agree in all else, by this parameter."""
    found: dict[object, Cells] = {}
    for group in group_runs(results.of(experiment.record, suite.name)):
        cell = experiment.cell.read(group.cell, suite.name)
        setting = tuple(value for name, value in cell.model_dump().items() if name != parameter)
        found.setdefault(setting, []).append((cell, group))
    return [sorted(each, key=lambda pair: getattr(pair[0], parameter)) for each in found.values()]


def faster(difference: float) -> float:
    """Return how many times as fast, from a relative difference of latencies."""
    return 1 / max(1e-9, 1 + difference)


def faster_entry(group: RecordGroup[Any], policy: str, baseline: str, *, interval: bool) -> Entry:
    shown = format_number(group.value(policy, MEAN), 2)
    compared = group.compare(policy, baseline, MEAN)
    if compared is None:
        return Entry(shown)
    note = f"{format_number(faster(compared.difference), 2)}{THIN}×"
    if interval and compared.known:
        low, high = (format_number(faster(end), 2) for end in (compared.high, compared.low))
        note += f" [{low}, {high}]"
    return Entry(shown, note=note, verdict=compared.verdict if compared.known else "")


def draw_table(table: Table, x: str, y: str, *, rows: Mapping[str, str]) -> Picture:
    """Return a picture of the numbers in these `rows` of a table along its columns, each with the look of a policy."""
    ticks = table.headings[table.labels :]
    lines: dict[str, list[tuple[float, float]]] = {}
    said = []
    for name, *entries in ([each.text for each in row] for row in table.rows):
        known = [(place, text) for place, text in enumerate(entries) if text not in ("", "–")]
        if name in rows and known:
            lines[name] = [(place, float(text.replace(",", ""))) for place, text in known]
            said.append(f"{name}: {', '.join(f'{ticks[place]} {text}' for place, text in known)}")

    alt = "; ".join(said)
    return draw_lines(table.title, lines, x, y, alt=alt, looks=rows, ticks=ticks, adjust=from_zero)


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times shorter a time is, with its 95 % interval (0 to inf: too few requests), held against the `least`
    that is required (None: nothing is)."""

    found: PairedDifference
    least: float | None

    @classmethod
    def of(cls, baseline: Sequence[Any], ours: Sequence[Any], least: float | None, statistic: Statistic) -> Self:
        """Raises as `compare`."""
        return cls(compare(baseline, ours, statistic=statistic, relative=True, better="lower"), least)

    @property
    def ratio(self) -> float:
        return _shorter(self.found.difference)

    @property
    def low(self) -> float:
        return _shorter(self.found.high)

    @property
    def high(self) -> float:
        return _shorter(self.found.low)

    @property
    def by_seed(self) -> tuple[float, ...]:
        return tuple(map(_shorter, self.found.by_seed))

    @property
    def met(self) -> Literal["met", "not met", "not decided", ""]:
        if self.least is None:
            return ""
        if self.ratio < self.least:
            return "not met"
        return "met" if self.found.known and self.low >= self.least else "not decided"

    @property
    def interval(self) -> str:
        return f"[{format_number(self.low, 2)}, {format_number(self.high, 2)}]"


def _shorter(difference: float) -> float:
    return inf if difference <= -1 else 1 / (1 + difference)


def mean_s(run: Record) -> float:
    return fmean(run.rows["latency_s"])


def seed_by_seed(group: RecordGroup[Any], baseline: str, policy: str) -> PairedDifference | None:
    """Return the relative difference of the mean latencies, or None without common seeds: those of one run wait for one
    another, so seeds are drawn."""
    means = [tuple(map(mean_s, pair)) for pair in group.pairs(baseline, policy)]
    return compare_seeds(*zip(*means, strict=True), relative=True) if means else None


def late_s(run: Record) -> float:
    """Return the 99th percentile of the latencies."""
    seconds: float = sorted(run.rows["latency_s"])[round(0.99 * (len(run.rows["latency_s"]) - 1))]
    return seconds


def cached_share(run: Record, tokens: str = "cached_tokens") -> float:
    """Return the share of the prompt tokens that is cached, or in another column."""
    return float(sum(run.rows[tokens]) / max(1, sum(run.rows["prompt_tokens"])))


def share(runs: Iterable[Record], part: str, whole: str) -> float | None:
    """Return the sum of a fact over that of another one, or None if that is zero or missing."""
    facts = [run.facts for run in runs]
    total = sum(each.get(whole, 0) for each in facts)
    return sum(each[part] for each in facts) / total if total else None


def share_column(heading: str, part: str, whole: str) -> Column:
    def entry(found: float | None) -> str:
        return format_number(None if found is None else 100 * found)

    return Column(heading, lambda row: entry(share(row.runs, part, whole)))
