"""Tables of steps with streamed weights."""

from __future__ import annotations

from ragorder.benchmarks.doll.streaming.record import StreamingCell, StreamingRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group, suite.baseline) for group in group_runs(results.of(StreamingRecord, suite.name))])


def _table(group: RecordGroup[StreamingRecord], baseline: str | None) -> Table:
    cell = StreamingCell.read(group.cell, "streaming")
    lines = group.runs()
    by_policy = {line.policy: line for line in lines}
    headings = [
        "policy",
        "step, s",
        "least",
        "most",
        f"of {baseline}",
        "of one ahead",
        "of the bound",
        "GB",
        "waits, s",
    ]
    table = Table(
        f"Steps of {cell.layers} layers, {cell.budget_layers} on the device, read at {cell.gigabytes_s:g} GB/s, "
        f"jitter {format_number(100 * cell.jitter)} %",
        [*headings, "same logits"],
    )
    for line in lines:
        times, facts = line.rows["step_s"], line.facts
        base, ahead = by_policy.get(baseline or ""), by_policy.get("one ahead")
        table.add(
            line.policy,
            *(format_number(step_s, 3) for step_s in (line.step_s, min(times), max(times))),
            _ratio(line, base),
            _ratio(line, ahead),
            format_number(line.step_s / line.bound_s, 2),
            format_number(facts["bytes"] / 1e9, 2),
            format_number(facts["waits_s"], 3),
            "yes" if facts["equal"] else "NO",
        )
    facts = lines[0].facts
    table.note = (
        f"Medians; {facts['tokens']:,} tokens a step, {facts['threads']} threads. Reading alone takes "
        f"{format_number(facts['stream_s'], 3)} s, computing alone {format_number(facts['compute_s'], 3)} s; the "
        "longer one is the bound. GB and waits are of one step."
    )
    return table


def _ratio(line: StreamingRecord, other: StreamingRecord | None) -> str:
    return "" if other is None else format_number(line.step_s / other.step_s, 2)
