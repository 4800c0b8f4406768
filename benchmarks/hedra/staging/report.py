"""Tables and pictures of searches in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.benchmarks.hedra.staging.record import StagingRecord
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_Group = RecordGroup[StagingRecord]


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(StagingRecord, suite.name))
    final = [group for group in groups if "final" in group.runs()[0].facts]
    tables = [*map(_overhead, groups), *map(_convergence, final)]
    return Part(tables, pictures=lambda: [*map(_overhead_picture, groups), *map(_convergence_picture, final)])


def _vectors(group: _Group) -> str:
    cell = group.cell
    return str(cell.get("corpus") or f"{cell.get('vectors', 40_000):,} random vectors")


def _overhead(group: _Group) -> Table:
    headings = ["search", "stages", "without, ms", "added, ms", "added a stage, ms"]
    table = Table(f"What stages add to a search: {_vectors(group)}", headings)
    for line in group.runs():
        stages = line.facts["stages"]
        times = (line.plain_ms, line.added_ms, line.added_ms / stages)
        table.add(line.facts["search"], str(stages), *(format_number(ms, 3) for ms in times))
    table.note = f"Medians of {len(group.runs()[0].rows['plain_ms'])} queries, CPU time."
    return table


def _convergence(group: _Group) -> Table:
    lines = group.runs()
    facts = lines[0].facts
    table = Table(f"Top k final: {_vectors(group)}, {facts['questions']:,} questions", ["search"])
    table.headings = ["search", *(f"top {k}" for k in facts["final"])]
    for line in lines:
        shares = line.facts["final"].values()
        table.add(line.facts["search"], *(" ".join(format_number(100 * share) for share in each) for each in shares))
    table.note = "% of questions, after each stage in turn."
    return table


def _overhead_picture(group: _Group) -> Picture:
    lines = group.runs()

    def paint(axes: Any) -> None:
        places = range(len(lines))[::-1]
        axes.barh(places, [line.plain_ms for line in lines], color=style("retrieval").colour, label="the search")
        added = [max(0.0, line.added_ms) for line in lines]
        left = [line.plain_ms for line in lines]
        axes.barh(places, added, left=left, color=style("earned").colour, label="added by stages")
        axes.set_yticks(places, [line.policy for line in lines])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("CPU time a query, ms")
        axes.legend(fontsize=8, frameon=False)

    alt = "; ".join(
        f"{line.policy}: {format_number(line.plain_ms, 3)} + {format_number(line.added_ms, 3)} ms" for line in lines
    )
    return draw(paint, title="What stages add", alt=alt, caption=f"{_vectors(group)}; medians.", height=3.6)


def _convergence_picture(group: _Group) -> Picture:
    shown = [line for line in group.runs() if line.policy in ("IVF 1 equal", "IVF 1 geometric", "HNSW 256")]

    def paint(axes: Any) -> None:
        ends = []
        for line, name in zip(shown, ("earned", "greedy", "sorted"), strict=False):
            looks, shares = style(name), _shares(line)
            axes.plot(range(1, len(shares) + 1), shares, looks.dashes, marker=looks.marker, color=looks.colour)
            ends.append((len(shares), shares[-1], line.policy, looks))
        axes.set_xlabel("stage")
        axes.set_ylabel("top 1 final, % of questions")
        label_ends(axes, ends)

    alt = "; ".join(f"{line.policy}: {', '.join(format_number(share) for share in _shares(line))} %" for line in shown)
    return draw(paint, title="When the best document is final", alt=alt, caption=_vectors(group))


def _shares(line: StagingRecord) -> Sequence[float]:
    return [100 * share for share in next(iter(line.facts["final"].values()))]
