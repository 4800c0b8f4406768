"""Steps of a model whose weights stream from a disk, by layers read ahead (suite doll-streaming)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.doll.streaming.cells import SLOTS, StreamingCell
from ragorder.eval.report.declared import Block, Column, TableForm, figure, policy_column, ratio
from ragorder.eval.report.words import format_number
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line


def step_s(run: Record) -> float:
    return float(median(run.rows["step_s"]))


def _of_the_bound(run: Record) -> float:
    """What no step can be shorter than is the longer of reading and computing."""
    return step_s(run) / max(float(run.facts["stream_s"]), float(run.facts["compute_s"]))


def _columns(block: Block) -> Sequence[Column]:
    baseline = block.suite.baseline
    return [
        policy_column(),
        figure("step, s", step_s, 3),
        figure("least", lambda run: min(run.rows["step_s"]), 3),
        figure("most", lambda run: max(run.rows["step_s"]), 3),
        ratio(f"of {baseline}", step_s, baseline),
        ratio("of one ahead", step_s, "one ahead"),
        figure("of the bound", _of_the_bound, 2),
        figure("GB", "bytes", 2, scale=1e-9),
        figure("waits, s", "waits_s", 3),
        Column("same logits", lambda row: "yes" if row.runs[0].facts["equal"] else "NO"),
    ]


def _note(block: Block) -> str:
    facts = block.first.facts
    return (
        f"Medians; {facts['tokens']:,} tokens a step, {facts['threads']} threads. Reading alone takes "
        f"{format_number(facts['stream_s'], 3)} s, computing alone {format_number(facts['compute_s'], 3)} s; the "
        "longer one is the bound. GB and waits are of one step."
    )


class Streaming(Experiment):
    """Column `step_s`: seconds of each step. Facts: `stream_s` and `compute_s`, a step's reading and computing alone;
    `tokens` of a step; `bytes` read, `waits` for layers and `waits_s` a step; `slots`; whether the logits are
    `equal` to those of the first policy."""

    kind = "streaming"
    cell = StreamingCell
    columns = ("step_s",)
    facts = ("stream_s", "compute_s")
    policies: ClassVar[Any] = tuple(SLOTS)
    unit = "steps"
    sized_by = "steps"
    packages: ClassVar[Any] = {"torch": "torch", "transformers": "torch"}
    one_job = True
    tables = (
        TableForm(
            lambda block: (
                f"Steps of {block.cell.layers} layers, {block.cell.budget_layers} on the device, read at "
                f"{block.cell.gigabytes_s:g} GB/s, jitter {format_number(100 * block.cell.jitter)} %"
            ),
            _columns,
            note=_note,
        ),
    )

    def steps(self, job: Job) -> int:
        return len(job.policies) * int(job.cell.repeats) * job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.streaming.measuring import Bench, write_model

        cell: StreamingCell = job.cell
        times: dict[str, list[float]] = {policy: [] for policy in job.policies}
        facts: dict[str, dict[str, Any]] = {}
        with (
            TemporaryDirectory(prefix="ragorder-streaming-") as folder,
            Bench(write_model(Path(folder), cell, job.seed), cell, job.seed) as bench,
        ):
            bench.calibrate()
            for _ in range(cell.repeats):
                for policy in job.policies:
                    times[policy] += bench.steps(policy, job.requests, advance)
            facts = {policy: bench.facts(policy) for policy in job.policies}
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "torch"},
                "facts": facts[policy],
                "rows": {"step_s": [round(step_s, 5) for step_s in times[policy]]},
            }
