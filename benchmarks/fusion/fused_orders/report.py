"""Table of what fused requests compute."""

from __future__ import annotations

from ragorder.benchmarks.fusion.fused_orders.record import FusedOrdersCell, FusedOrdersRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_HEADINGS = (
    "corpus",
    "device, tokens",
    "order",
    "exact prefix, %",
    "taken over, %",
    "reused from the 101st request on, %",
    "computed, thousand tokens",
    "of the ordered",
    "estimated, s",
    "of the ordered",
)
_FIRST = 100
_NOTE = (
    "Sums over all requests, in the order of the data. %: of the documents' tokens. Seconds: those of the replacement "
    "suites' estimated A10G for as many tokens computed at the end of a prompt as long."
)


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(FusedOrdersRecord, suite.name))
    return Part([_table(copies, groups) for copies in ("all", "served") if _of(copies, groups)])


def _of(copies: str, groups: list[RecordGroup[FusedOrdersRecord]]) -> list[RecordGroup[FusedOrdersRecord]]:
    return [group for group in groups if FusedOrdersCell.read(group.cell, "fused-orders").copies == copies]


def _table(copies: str, groups: list[RecordGroup[FusedOrdersRecord]]) -> Table:
    title = "All documents can be taken over" if copies == "all" else "Documents that are held can be taken over"
    table = Table(title, list(_HEADINGS), labels=3, note=_NOTE)
    for group in _of(copies, groups):
        cell = FusedOrdersCell.read(group.cell, "fused-orders")
        room = "unlimited" if cell.device_tokens is None else f"{cell.device_tokens:,}".replace(",", THIN)
        ordered = group.runs("ordered")
        for run in group.runs():
            before = next((each for each in ordered if each.seed == run.seed), None)
            table.add(
                cell.corpus,
                room,
                run.policy,
                *(_share(run, name) for name in ("exact_tokens", "fused_tokens")),
                _reused_later(run),
                format_number(run.total("computed_tokens") / 1e3),
                _ratio(run, before, "computed_tokens"),
                format_number(run.total("seconds")),
                _ratio(run, before, "seconds"),
            )
    return table


def _share(run: FusedOrdersRecord, column: str) -> str:
    return format_number(100 * run.total(column) / run.total("document_tokens"))


def _ratio(run: FusedOrdersRecord, before: FusedOrdersRecord | None, column: str) -> str:
    return "" if before is None else format_number(run.total(column) / before.total(column), 4)


def _reused_later(run: FusedOrdersRecord) -> str:
    """Exact and taken over; empty without so many requests."""
    whole, exact, fused = (sum(run.rows[name][_FIRST:]) for name in ("document_tokens", "exact_tokens", "fused_tokens"))
    return format_number(100 * (exact + fused) / whole) if whole else ""
