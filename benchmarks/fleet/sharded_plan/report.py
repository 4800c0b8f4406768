"""Tables of batches planned in shards."""

from __future__ import annotations

from statistics import fmean

from ragorder.benchmarks.fleet.sharded_plan.record import ShardedPlanRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_ENOUGH = 97.0


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group_runs(results.of(ShardedPlanRecord, suite.name)))])


def _table(groups: list[RecordGroup[ShardedPlanRecord]]) -> Table:
    headings = [
        "workload",
        "requests",
        "shards",
        "saved, %",
        "of one plan, %",
        "largest / mean shard",
        "µs a request",
        "memory, GiB",
    ]
    table = Table("Batches planned at once and in shards", headings, labels=3)
    seeds: set[int] = set()
    for group in groups:
        seeds.update(group.seeds)
        one = [run.saved for run in group.runs("one plan")]
        for policy in group.policies:
            runs = group.runs(policy)
            saved, share = fmean(run.saved for run in runs), None
            tone: Tone = ""
            if one and policy != "one plan":
                share = 100 * saved / fmean(one)
                tone = "good" if share >= _ENOUGH else "bad"
            facts = [run.facts for run in runs]
            table.add(
                str(group.cell.get("workload", "topics")),
                f"{fmean(each['requests'] for each in facts):,.0f}",
                "one plan" if policy == "one plan" else str(group.cell.get("shards", 64)),
                Entry(format_number(100 * saved), note=range_words((100 * run.saved for run in runs), 1)),
                Entry(format_number(share), tone=tone),
                format_number(fmean(each["largest"] for each in facts), 2),
                format_number(1e6 * fmean(each["core_s"] / max(1, each["requests"]) for each in facts), 0),
                format_number(max(each["peak_bytes"] for each in facts) / 2**30, 2),
            )
    table.note = (
        f"Mean of {len(seeds)} seeds (in brackets their range). Time is that of all cores, from the file that is read "
        "to those that are written; memory the most that all processes had together."
    )
    return table
