"""Tables of successive searches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ragorder.benchmarks.hedra.locality.record import LocalityCell, LocalityRecord
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_SCANNED = (0.05, 0.125, 0.25, 0.5)
_ORDERS = {"nearest": "nearest first", "history": "by the first search"}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(LocalityRecord, suite.name))
    return Part([table for group in groups for table in _tables(group)], pictures=lambda: [*map(_picture, groups)])


def _tables(group: RecordGroup[LocalityRecord]) -> Iterable[Table]:
    lines = group.runs()
    facts = lines[0].facts
    cell = LocalityCell.read(group.cell, "locality")
    setting = f"{cell.corpus}, {len(lines[0].rows['final_at']):,} questions, top {cell.top_k}"
    scanned = [f"{format_number(100 * share)} %" for share in _SCANNED]
    table = Table(f"Second searches that are final: {setting}", ["clusters", *scanned, "final after, mean"])
    for line in lines:
        shares = [_percent(line.final_share(share)) for share in _SCANNED]
        table.add(_ORDERS[line.policy], *shares, format_number(line.mean_final_at))
    table.note = (
        f"% of searches, after this share of the {facts['nprobe']} clusters of {facts['clusters']} that each scans; "
        "and after which cluster one is final: up to 28 % earlier by the first search's order in HedraRAG (Figure 9b)."
    )
    if "as_faiss" in facts:
        searched = 2 * len(lines[0].rows["final_at"])
        table.note += f" Of {searched:,} searches that shared their time {facts['as_faiss']:,} found what FAISS finds."
    yield table

    table = Table(f"What patience saves, and its recall: {setting}", ["patience", *facts["patience"]])
    for line in lines:
        ends = line.facts["patience"].values()
        table.add(_ORDERS[line.policy], *(f"{_percent(saved)}, {_percent(recall)}" for saved, recall in ends))
    table.note = "% of clusters not scanned, % of the results found."
    yield table

    table = Table(f"What a first search says about the second: {setting}", ["of the second's results", "%"])
    for name, share in facts["observations"].items():
        table.add(f"all {name}", _percent(share))
    yield table

    table = Table(f"Distances between embeddings: {setting}", ["from the second query to", "mean"])
    table.add("the first query", format_number(facts["to_first_query"], 2))
    table.add("its five nearest passages", format_number(facts["to_neighbours"], 2))
    table.add("its nearest passage", format_number(facts["to_nearest"], 2))
    for share, distance in facts["to_whole"].items():
        table.add(
            f"{format_number(100 * float(share))} % of the whole answer, from the whole", format_number(distance, 2)
        )
    yield table

    table = Table(f"Work in the clusters used most: {setting}", ["of the clusters", "of the codes scanned, %"])
    for share, work in facts["skew"].items():
        table.add(f"{format_number(100 * float(share))} %", _percent(work))
    yield table


def _picture(group: RecordGroup[LocalityRecord]) -> Picture:
    """The curve of early ends: each point a patience."""
    lines = group.runs()
    points = {
        line.policy: [(100 * saved, 100 * recall) for saved, recall in line.facts["patience"].values()]
        for line in lines
    }

    def paint(axes: Any) -> None:
        for policy, found in points.items():
            looks = style("earned" if policy == "history" else "retrieval")
            axes.plot(
                *zip(*found, strict=True), looks.dashes, marker=looks.marker, color=looks.colour, label=_ORDERS[policy]
            )
        for patience, (saved, recall) in zip(lines[-1].facts["patience"], points[lines[-1].policy], strict=True):
            axes.annotate(patience, (saved, recall), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xlabel("clusters not scanned, %")
        axes.set_ylabel("results found, %")
        axes.legend(fontsize=8, frameon=False, loc="lower left")

    alt = "; ".join(
        f"{_ORDERS[policy]}: "
        + ", ".join(f"{format_number(recall)} % at {format_number(saved)} %" for saved, recall in found)
        for policy, found in points.items()
    )
    corpus = LocalityCell.read(group.cell, "locality").corpus
    return draw(paint, title="What an early end costs", alt=alt, caption=f"{corpus}; at each point its patience.")


def _percent(share: float) -> str:
    return format_number(100 * share)
