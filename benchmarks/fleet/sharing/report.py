"""Tables of processes that share an engine."""

from __future__ import annotations

from statistics import fmean

from ragorder.benchmarks.fleet.sharing.record import SharingRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_ENOUGH = 90.0


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(SharingRecord, suite.name))
    workloads = dict.fromkeys(group.cell["workload"] for group in groups)
    return Part([_table([group for group in groups if group.cell["workload"] == each], each) for each in workloads])


def _table(groups: list[RecordGroup[SharingRecord]], workload: str) -> Table:
    headings = ["processes", "orders", "known to the others", "cached, %", "of one process, %", "exact, %"]
    table = Table(f"{workload}: processes in front of one engine", headings, labels=3)
    one = [run.cached for group in groups if group.cell["processes"] == 1 for run in group.runs("own orders")]
    seeds: set[int] = set()
    for group in sorted(groups, key=lambda each: each.cell["processes"]):
        for policy in group.policies:
            runs = group.runs(policy)
            seeds.update(group.seeds)
            cached, share = fmean(run.cached for run in runs), None
            tone: Tone = ""
            if one:
                share = 100 * cached / fmean(one)
                if policy == "shared orders" and not group.cell.get("late", 0):
                    tone = "good" if share >= _ENOUGH else "bad"
            table.add(
                str(group.cell["processes"]),
                policy,
                _late(group.cell.get("late", 0)) if policy == "shared orders" else "–",
                Entry(format_number(100 * cached), note=range_words((100 * run.cached for run in runs), 1)),
                Entry(format_number(share), tone=tone),
                format_number(100 * fmean(run.exact for run in runs)),
            )
    table.note = f"Mean of {len(seeds)} seeds (in brackets their range)."
    return table


def _late(requests: int) -> str:
    return f"{requests} requests later" if requests else "with the next request"
