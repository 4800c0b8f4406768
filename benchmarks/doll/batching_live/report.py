"""Table of requests within a memory budget in real time."""

from __future__ import annotations

from statistics import fmean

from ragorder.benchmarks.doll.batching_live.record import BatchingLiveCell, BatchingLiveRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_WORDS = {"serial": "serial static batches", "decoupled": "DecoupledServer, ordered"}
# Both systems are to have the same cores, engine and disk: facts that show it.
_FACTS = {
    "streamed": "layers read a step",
    "pass_s": "a pass as read, s",
    "step_s": "a step, s",
    "beside_s": "beside reading, s",
}


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group) for group in group_runs(results.of(BatchingLiveRecord, suite.name))])


def _table(group: RecordGroup[BatchingLiveRecord]) -> Table:
    cell = BatchingLiveCell.read(group.cell, "doll-live")
    title = f"Mean latency, {cell.arrivals.count:,} requests, {cell.scale:g} times as fast"
    table = Table(
        title, ["", "mean, s", "times shorter", "longest, s", "last answer, s", "cached, %", *_FACTS.values()]
    )
    base = _mean(group.runs("serial"))
    for policy in group.policies:
        runs = group.runs(policy)
        mean = _mean(runs)
        cached = sum(run.facts["cached_tokens"] for run in runs) / sum(run.facts["prompt_tokens"] for run in runs)
        table.add(
            _WORDS[policy],
            format_number(mean),
            format_number(base / mean if base and mean else None, 2),
            format_number(max(max(run.rows["latency_s"]) for run in runs)),
            format_number(fmean(run.facts["total_s"] for run in runs)),
            format_number(100 * cached),
            *(format_number(_fact(runs, name), 3) for name in _FACTS),
        )
    step_s, pass_s = cell.step_s / cell.scale, cell.pass_s / cell.scale
    table.note = (
        f"Weights of {cell.layers} layers stream in {format_number(step_s, 3)} s a step, partitions in "
        f"{format_number(pass_s, 2)} s a pass: the paper's times with 70B on PF-High, by the scale."
    )
    return table


def _mean(runs: list[BatchingLiveRecord]) -> float | None:
    return fmean(fmean(run.rows["latency_s"]) for run in runs) if runs else None


def _fact(runs: list[BatchingLiveRecord], name: str) -> float | None:
    known = [value for run in runs if (value := run.facts.get(name)) is not None]
    return fmean(known) if known else None
