"""Table of reordered queues: how many times shorter than first come, first served the mean time to first token is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.benchmarks.ragcache.reordering.experiment import ReorderingRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.metrics import TBT_P50, TBT_P99, TTFT_MEAN, TTFT_P50, TTFT_P99, Metric
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_BASELINE = "fcfs"
_NOTE = (
    "Mean time to first token in the order of arrival, divided by the queue's: mean of the seeds (range). Below it: by "
    "how many later requests one was overtaken at most. +waiting: arranged for the next 8 waiting requests as well."
)
_TBT_NOTE = "Over answers of several tokens, each with its mean (RAGCache 5.4)."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(ReorderingRecord, suite.name))
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies if policy != _BASELINE))
    table = Table("Mean TTFT, times shorter", ["", *policies], note=_NOTE)
    for group in groups:
        row = [_times_shorter(group, policy) for policy in policies]
        table.rows.append([Entry(group.label), *row])
    names = [_BASELINE, *policies]
    tables = [table, _times("Time to first token", (TTFT_P50, TTFT_MEAN, TTFT_P99), groups, names)] if groups else []
    if timed := [group for group in groups if group.has("tbt_ms")]:
        tables.append(_times("Time between tokens", (TBT_P50, TBT_P99), timed, names, _TBT_NOTE))
    return Part(tables)


def _times(
    title: str,
    metrics: Sequence[Metric],
    groups: Sequence[RecordGroup[ReorderingRecord]],
    policies: Sequence[str],
    note: str = "",
) -> Table:
    statistics = ", ".join(each.statistic for each in metrics)
    table = Table(f"{title}: {statistics}, ms", ["", *policies], note=note)
    for group in groups:
        times = ([format_number(group.value(policy, each)) for each in metrics] for policy in policies)
        table.rows.append([Entry(group.label), *(Entry(", ".join(each)) for each in times)])
    return table


def _times_shorter(group: RecordGroup[ReorderingRecord], policy: str) -> Entry:
    theirs, ours = (group.policies.get(each, {}) for each in (_BASELINE, policy))
    pairs = [[TTFT_MEAN.value([side[seed]]) for side in (theirs, ours)] for seed in sorted(theirs.keys() & ours.keys())]
    ratios = [plain / mean for plain, mean in pairs if plain and mean]
    if not ratios:
        return Entry("–")
    overtaking = max(int(run.facts.get("largest_overtaking", 0)) for run in ours.values())
    spread = f" ({format_number(min(ratios), 2)} to {format_number(max(ratios), 2)})" if len(ratios) > 1 else ""
    return Entry(f"{format_number(fmean(ratios), 2)}{spread}", f"overtaken by {overtaking}")
