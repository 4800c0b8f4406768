"""Table of an index on disk."""

from __future__ import annotations

from statistics import fmean

from ragorder.benchmarks.doll.disk_index.record import DiskIndexCell, DiskIndexRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_WORDS = {
    "partitions": "partitions, loaded one by one",
    "codes": "product quantisation in memory",
    "codes refined": "and refined from disk",
}


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group) for group in group_runs(results.of(DiskIndexRecord, suite.name))])


def _table(group: RecordGroup[DiskIndexRecord]) -> Table:
    cell = DiskIndexCell.read(group.cell, "doll-disk-index")
    held = cell.corpus or f"{cell.vectors:,} random vectors of {cell.dimensions}"
    table = Table(
        f"A batch of {cell.requests} searches: {held}, top {cell.top_k}",
        ["", "memory, % of the vectors", "read, % of the vectors", "found, %"],
    )
    for policy in group.policies:
        facts = [record.facts for record in group.runs(policy)]
        row = (
            fmean(100 * each[name] / each["vector_bytes"] for each in facts) for name in ("memory_bytes", "read_bytes")
        )
        recall = fmean(100 * each["recall"] for each in facts)
        table.add(_WORDS[policy], *(format_number(each) for each in (*row, recall)))
    table.note = (
        f"Of the true nearest; each search scans {format_number(100 * cell.nprobe, 0)} % of the clusters. Pages of "
        f"4 KiB, each read once a batch; {cell.factor} candidates a result are refined."
    )
    return table
