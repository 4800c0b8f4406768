"""Table of the peak memory under each attack."""

from __future__ import annotations

from statistics import median

from ragorder.benchmarks.proxy.proxy_memory.attacks import ATTACKS, EVERYTHING
from ragorder.benchmarks.proxy.proxy_memory.experiment import ProxyMemoryRecord
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_NOTE = (
    "The most memory of the proxy's process, restarted for each attack: median of {seeds} runs, in brackets their "
    "range."
)


def make_part(suite: Suite, results: Results) -> Part:
    table = Table("Memory", ["attack", "peak, MB"], labels=1)
    for group in group_runs(results.of(ProxyMemoryRecord, suite.name)):
        table.note = _NOTE.format(seeds=len(group.seeds))
        for policy in group.policies:
            runs = group.runs(policy)
            peaks = [run.rows["peak_mb"][0] for run in runs]
            spread = f"{format_number(min(peaks), 0)} to {format_number(max(peaks), 0)}" if len(peaks) > 1 else ""
            table.add(_words(policy, runs[0]), Entry(format_number(median(peaks), 0), note=spread))
    return Part([table] if table.rows else [])


def _words(policy: str, run: ProxyMemoryRecord) -> str:
    if policy in ATTACKS:
        return f"{run.rows['clients'][0]:,} {ATTACKS[policy].says}"
    if policy == EVERYTHING:
        seconds = run.cell.get("seconds", "")
        return f"all of these and other bodies at once, {seconds:g} s" if seconds else "all of these at once"
    return "none, at its start"
