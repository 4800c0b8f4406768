"""Tables and pictures of an index in two tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ragorder.benchmarks.hedra.hybrid_index.record import HybridCell, HybridRecord
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_BOTH = "file and memory"
_MEAN = Metric("mean latency", "latency_ms", "ms", relative=True, better="lower")
_Cells = Sequence[tuple[HybridCell, RecordGroup[HybridRecord]]]


def make_part(suite: Suite, results: Results) -> Part:
    by_setting: dict[tuple[object, ...], list[tuple[HybridCell, RecordGroup[HybridRecord]]]] = {}
    for group in group_runs(results.of(HybridRecord, suite.name)):
        cell = HybridCell.read(group.cell, "hybrid-index")
        setting = tuple(value for name, value in cell.model_dump().items() if name != "held")
        by_setting.setdefault(setting, []).append((cell, group))
    found = [sorted(each, key=lambda pair: pair[0].held) for each in by_setting.values()]
    return Part(
        [_table(each, suite.baseline) for each in found],
        pictures=lambda: [picture for each in found for picture in _picture(each)],
    )


def _name(cells: _Cells) -> str:
    cell = cells[0][0]
    return cell.corpus or f"{cell.vectors:,} random vectors, {format_number(100 * cell.skew, 0)} % in a fifth"


def _mean(group: RecordGroup[HybridRecord], fact: str) -> float:
    values = [run.facts[fact] for run in group.runs(_BOTH)]
    return sum(values) / len(values) if values else float("nan")


def _table(cells: _Cells, baseline: str) -> Table:
    held = [f"{format_number(100 * cell.held, 0)} % held" for cell, _ in cells]
    table = Table(f"An index of which memory holds a part: {_name(cells)}", ["", *held])
    possible = []
    for cell, group in cells:
        shares = [run.facts["skew"][f"{cell.held:g}"] for run in group.runs()]
        possible.append(format_number(100 * sum(shares) / len(shares)))
    table.add("work in as many clusters, %", *possible)
    table.add("hit share, %", *(format_number(100 * _mean(group, "hit_share")) for _, group in cells))
    for policy in (baseline, _BOTH):
        table.add(f"{policy}, ms", *(_entry(group, policy, baseline) for _, group in cells))
    table.note = "Hit share: of the codes scanned, after the first half of the searches. Mean latency of one search."
    return table


def _entry(group: RecordGroup[HybridRecord], policy: str, baseline: str) -> Entry:
    shown = format_number(group.value(policy, _MEAN), 2)
    compared = group.compare(policy, baseline, _MEAN)
    if compared is None:
        return Entry(shown)
    times = f"{format_number(1 / max(1e-9, 1 + compared.difference), 2)}{THIN}×"
    return Entry(shown, note=times, verdict=compared.verdict if compared.known else "")


def _picture(cells: _Cells) -> Iterable[Picture]:
    points = [(100 * cell.held, 100 * _mean(group, "hit_share")) for cell, group in cells if group.runs(_BOTH)]
    if len(points) < 2:
        return

    def paint(axes: Any) -> None:
        looks, plain = style("earned"), style("retrieval")
        axes.plot(*zip(*points, strict=True), looks.dashes, marker=looks.marker, color=looks.colour)
        axes.plot((0, 100), (0, 100), plain.dashes, color=plain.colour, linewidth=1)
        axes.set_xlabel("clusters held, %")
        axes.set_ylabel("codes scanned in memory, %")
        axes.set_xlim(0, 1.1 * points[-1][0])
        axes.set_ylim(0, 100)

    alt = ", ".join(f"{format_number(hit)} % at {format_number(held, 0)} % held" for held, hit in points)
    yield draw(paint, title="Hits of the fast tier", alt=alt, caption=f"{_name(cells)}; dashed: without skew.")
