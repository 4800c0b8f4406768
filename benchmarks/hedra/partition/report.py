"""Tables and pictures of searches that share their time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ragorder.benchmarks.hedra.partition.record import PartitionCell, PartitionRecord
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_Group = RecordGroup[PartitionRecord]
_MEAN = Metric("mean latency", "latency_ms", "ms", relative=True, better="lower")
_LOOKS = dict(
    zip(
        ("batches by clusters", "equal shares", "oldest first", "shortest first"),
        ("sorted", "none", "earned", "prefix"),
        strict=True,
    )
)


def make_part(suite: Suite, results: Results) -> Part:
    by_setting: dict[tuple[object, ...], list[tuple[PartitionCell, _Group]]] = {}
    for group in group_runs(results.of(PartitionRecord, suite.name)):
        cell = PartitionCell.read(group.cell, "partition")
        setting = tuple(value for name, value in cell.model_dump().items() if name != "load")
        by_setting.setdefault(setting, []).append((cell, group))
    found = [sorted(each, key=lambda pair: pair[0].load) for each in by_setting.values()]
    return Part(
        [_table(each, suite.baseline) for each in found],
        pictures=lambda: [picture for each in found for picture in _picture(each, suite.baseline)],
    )


def _title(cell: PartitionCell) -> str:
    cores = f"{cell.cores} core{'s' if cell.cores > 1 else ''}"
    return f"{cores}, {cell.clock} clock, {'mixed nprobe' if cell.mixed else 'one nprobe'}"


def _table(cells: Sequence[tuple[PartitionCell, _Group]], baseline: str) -> Table:
    loads = [f"load {cell.load:g}" for cell, _ in cells]
    table = Table(f"Mean latency, and how many times as fast as {baseline}: {_title(cells[0][0])}", ["search", *loads])
    policies = dict.fromkeys(policy for _, group in cells for policy in group.policies)
    for policy in policies:
        table.add(policy, *(_entry(group, policy, baseline) for _, group in cells))
    facts = [run.facts for _, group in cells for run in group.runs()]
    search_ms = sum(each["search_ms"] for each in facts) / len(facts)
    table.note = f"ms; a whole search takes {format_number(search_ms)} ms of one core."
    if pieces := [each["piece_cpu_us"] for each in facts if "piece_cpu_us" in each]:
        piece_us = format_number(sum(pieces) / len(pieces), 0)
        table.note += f" A piece takes {piece_us} µs of CPU time beside its scan, with 100 searches in flight."
    return table


def _entry(group: _Group, policy: str, baseline: str) -> Entry:
    shown = format_number(group.value(policy, _MEAN), 2)
    compared = group.compare(policy, baseline, _MEAN)
    if compared is None:
        return Entry(shown)
    low, high = (_times(end) for end in (compared.high, compared.low))
    interval = f" [{low}, {high}]" if compared.known else ""
    times = f"{_times(compared.difference)}{THIN}×"
    return Entry(shown, note=f"{times}{interval}", verdict=compared.verdict if compared.known else "")


def _times(difference: float) -> str:
    """From a relative difference of latencies."""
    return format_number(1 / max(1e-9, 1 + difference), 2)


def _picture(cells: Sequence[tuple[PartitionCell, _Group]], baseline: str) -> Iterable[Picture]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, group in cells:
        for policy in group.policies:
            compared = group.compare(policy, baseline, _MEAN)
            if compared is not None:
                lines.setdefault(policy, []).append((cell.load, 1 / max(1e-9, 1 + compared.difference)))
    if len(cells) < 2 or not lines:
        return

    def paint(axes: Any) -> None:
        axes.axhline(1, color=style("retrieval").colour, linewidth=1)
        ends = []
        for policy, points in lines.items():
            looks = style(_LOOKS.get(policy, policy))
            axes.plot(*zip(*points, strict=True), looks.dashes, marker=looks.marker, color=looks.colour)
            ends.append((*points[-1], policy, looks))
        axes.set_xlabel("load")
        axes.set_ylabel(f"times as fast as {baseline}")
        axes.set_ylim(bottom=0)
        label_ends(axes, ends)

    alt = "; ".join(
        f"{policy}: {', '.join(f'{format_number(times, 2)} at {load:g}' for load, times in points)}"
        for policy, points in lines.items()
    )
    yield draw(paint, title="Mean latency by load", alt=alt, caption=_title(cells[0][0]))
