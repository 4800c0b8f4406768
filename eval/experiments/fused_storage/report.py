"""Table of KV held and computed again."""

from __future__ import annotations

from statistics import fmean

from ragorder.eval.experiments.fused_storage.record import StorageCell, StorageRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
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
            held, again = _held(group, policy), _sum(group, policy, "again")
            table.add(
                room,
                policy,
                format_number(held / 1e3),
                _less(held, _held(group, _BASELINE)),
                format_number(again, 0),
                _less(again, _sum(group, _BASELINE, "again")),
                format_number(100 * _sum(group, policy, "found") / _sum(group, policy, "documents")),
            )
    first = groups[0]
    cell = StorageCell.read(first.cell, "fusion-storage")
    table.note = (
        f"Means of seeds {', '.join(map(str, first.seeds))}: {len(first.runs()[0].rows['held']):,} requests for "
        f"{cell.documents} documents of {cell.document_tokens} tokens, 60 % of them of {cell.known:,} that were "
        f"computed before, 30 % of {cell.uploads:,} uploads, 10 % asked for once. Less: than with a prefix cache alone. "
        "Again: of documents that had been computed before. The paper has 71.0 % less, 82.3 % less and 77.9 % found; it "
        "does not say of how many documents."
    )
    return Part([table])


def _held(group: RecordGroup[StorageRecord], policy: str) -> float | None:
    runs = group.runs(policy)
    return fmean(run.rows["held"][-1] for run in runs) if runs else None


def _sum(group: RecordGroup[StorageRecord], policy: str, column: str) -> float | None:
    runs = group.runs(policy)
    return fmean(sum(run.rows[column]) for run in runs) if runs else None


def _less(value: float | None, before: float | None) -> str:
    return "" if value is None or not before or value == before else format_number(100 * (1 - value / before))
