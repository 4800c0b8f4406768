"""Requests a second within an objective: a multiple of the time to the first token without load."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.eval.report.groups import Group
from ragorder.eval.report.statistics import StatisticsError, compare
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import change_words, format_number, policy_words, verdict_words
from ragorder.eval.running.record import Cell, Key, RunRecord, key_of

OBJECTIVE = 5.0

_HEADINGS = ("", "policy", "objective, ms", "requests within it, %", "of them a second")
_NOTE = (
    "The objective is {times:g} times the median time to the first token of one request at a time, in {baseline}. "
    "Changes are points, paired by request, with 95 % intervals: where it says no difference, it is not decided. A "
    "request that failed is not within."
)


def opens_loop(groups: Sequence[Group]) -> bool:
    """Whether requests arrived at a rate in any of them."""
    return any(group.cell.get("arrivals") for group in groups)


def objective_table(groups: Sequence[Group], baseline: str) -> Table | None:
    """None without cells of arrivals, or without the same of arrivals = none."""
    table = Table("Throughput under an objective", list(_HEADINGS), labels=2)
    unloaded = {
        _others(group.cell): found.p50
        for group in groups
        if group.cell.get("arrivals", "") is None
        if (found := group.summary(baseline, "ttft_ms")) is not None
    }
    for group in groups:
        limit_ms = OBJECTIVE * unloaded.get(_others(group.cell), 0.0)
        if not group.cell.get("arrivals") or not limit_ms:
            continue
        for policy in group.policies:
            within = [value for run in group.runs(policy) for value in _within(run, limit_ms)]
            if not within:
                continue
            share = fmean(within)
            rates = [run.throughput["requests_per_s"] for run in group.runs(policy) if run.throughput]
            table.add(
                group.label,
                policy_words(policy),
                format_number(limit_ms),
                Entry(format_number(share), *_change(group, baseline, limit_ms, policy)),
                format_number(share / 100 * fmean(rates) if rates else None, 2),
            )
    table.note = _NOTE.format(times=OBJECTIVE, baseline=policy_words(baseline))
    return table if table.rows else None


def _others(cell: Cell) -> Key:
    return key_of({name: value for name, value in cell.items() if name != "arrivals"})


def _within(run: RunRecord, limit_ms: float) -> list[float]:
    """100 for each request within the limit, else 0."""
    times = run.column("ttft_ms")
    return [] if times is None else [100.0 * (time <= limit_ms) for time in times.tolist()]


def _change(group: Group, baseline: str, limit_ms: float, policy: str) -> tuple[str, str]:
    if policy == baseline:
        return "baseline", ""
    within = [[_within(run, limit_ms) for run in pair] for pair in group.pairs(baseline, policy)]
    try:
        found = compare([theirs for theirs, _ in within], [ours for _, ours in within])
    except StatisticsError:
        return "", ""
    return change_words(found), verdict_words(found)
