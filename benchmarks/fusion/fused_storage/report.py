"""Table of KV held and computed again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.benchmarks.fusion.fused_storage.record import StorageCell, StorageRecord
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_BASELINE = "prefix cache"
_HEADINGS = (
    "device, tokens",
    "KV found",
    "held in the end, thousand tokens",
    "less, %",
    "documents computed again",
    "less, %",
    "of all documents found, %",
)


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(StorageRecord, suite.name))
    if not groups:
        return Part([])
    table = Table("KV of a knowledge base and of uploads", list(_HEADINGS), labels=2)
    for group in groups:
        cell = StorageCell.read(group.cell, "fusion-storage")
        room = "unlimited" if cell.device_tokens is None else f"{cell.device_tokens:,}".replace(",", THIN)
        for policy in group.policies:
            runs = group.runs(policy)
            held, again = _held(runs), _mean(runs, "again")
            before = group.runs(_BASELINE)
            table.add(
                room,
                policy,
                format_number(held / 1e3),
                _less(held, _held(before)) if before else "",
                format_number(again, 0),
                _less(again, _mean(before, "again")) if before else "",
                format_number(100 * _mean(runs, "found") / _mean(runs, "documents")),
            )
    first = groups[0]
    cell = StorageCell.read(first.cell, "fusion-storage")
    table.note = (
        f"Means of seeds {', '.join(map(str, first.seeds))}: {len(first.runs()[0].rows['held']):,} requests for "
        f"{cell.documents} documents of {cell.document_tokens} tokens, 60 % of them of {cell.known:,} that were "
        f"computed before, 30 % of {cell.uploads:,} uploads, 10 % asked for once. Less: than with a prefix cache "
        "alone. Again: of documents that had been computed before. The paper has 71.0 % less, 82.3 % less and 77.9 % "
        "found; it does not say of how many documents."
    )
    return Part([table])


def _held(runs: Sequence[StorageRecord]) -> float:
    return fmean(run.rows["held"][-1] for run in runs)


def _mean(runs: Sequence[StorageRecord], column: str) -> float:
    """Of the seeds' sums."""
    return fmean(sum(run.rows[column]) for run in runs)


def _less(value: float, before: float) -> str:
    return "" if value == before else format_number(100 * (1 - value / before))
