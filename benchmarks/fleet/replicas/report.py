"""Tables of simulated fleets."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from ragorder.benchmarks.fleet.replicas.record import ReplicasRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_BEST = "best"
_BOUNDED = ("topic, bound", "topic, table")
_ENOUGH = 0.9
_MOST_LOAD = 1.5


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(ReplicasRecord, suite.name))
    return Part([_table(group) for group in groups])


def _table(group: RecordGroup[ReplicasRecord]) -> Table:
    changed = any(run.facts.get("moved") for run in group.runs())
    headings = ["policy", "cached, %", "of best, %", "largest / mean work", "most in flight / mean", "exact, %"]
    table = Table(_title(group), [*headings, *(["topics moved, %"] if changed else [])])
    best = _cached(group, _BEST)
    for policy in group.policies:
        runs = group.runs(policy)
        cached, load = _cached(group, policy), fmean(run.load for run in runs)
        row: list[str | Entry] = [
            policy,
            Entry(format_number(cached), note=range_words((100 * run.cached for run in runs), 1)),
            "–" if not best else _goal(100 * cached / best, 100 * cached / best >= 100 * _ENOUGH, policy),
            _goal(load, load <= _MOST_LOAD, policy, 2),
            format_number(fmean(run.facts["in_flight"] for run in runs), 2),
            format_number(100 * fmean(run.facts["exact"] for run in runs)),
        ]
        table.add(*row, *([", ".join(_moved(runs)) or "–"] if changed else []))
    seeds = len(group.seeds)
    requests = sum(group.runs()[0].rows["requests"]) if group.runs() else 0
    table.note = f"Mean of {seeds} seeds (in brackets their range), {requests:,} requests each after the warm-up."
    if changed:
        table.note += " Topics moved: when a replica is added, and when one is removed."
    return table


def _title(group: RecordGroup[ReplicasRecord]) -> str:
    cell = group.cell
    return f"{cell.get('workload') or cell.get('corpus')}: {cell.get('replicas', 16)} replicas"


def _cached(group: RecordGroup[ReplicasRecord], policy: str) -> float:
    """In percent; 0 if it was not measured."""
    return 100 * fmean(run.cached for run in group.runs(policy)) if group.runs(policy) else 0.0


def _goal(figure: float, reached: bool, policy: str, decimals: int = 1) -> Entry:
    """The goals are those of topics with bounded load."""
    tone: Tone = ""
    if policy.startswith(_BOUNDED):
        tone = "good" if reached else "bad"
    return Entry(format_number(figure, decimals), tone=tone)


def _moved(runs: list[ReplicasRecord]) -> Iterator[str]:
    for shares in zip(*(run.facts.get("moved") or () for run in runs), strict=True):
        yield format_number(100 * fmean(shares), 1)
