"""Table of the workflow server's time."""

from __future__ import annotations

from ragorder.benchmarks.hedra.wavefront.record import WavefrontRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group_runs(results.of(WavefrontRecord, suite.name)))])


def _table(groups: list[RecordGroup[WavefrontRecord]]) -> Table:
    headings = ["requests in flight", "transformations", "ms a piece", "least", "most", "speculative", "cycles a piece"]
    table = Table("Processor time of scheduling", headings, labels=2)
    for group in groups:
        for line in group.runs():
            facts, times = line.facts, line.rows["ms"]
            table.add(
                str(group.cell.get("in_flight", 100)),
                line.policy,
                *(format_number(ms, 3) for ms in (line.ms, min(times), max(times))),
                f"{format_number(100 * facts['speculative'] / facts['pieces'])} %",
                format_number(facts["cycles"] / facts["pieces"], 2),
            )
    table.note = "Median, least and most of the repeats; the time of engine, search and embedder is taken off."
    return table
