"""Steps with streamed weights: the suites of kind "streaming"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.common.extras import install_hint
from ragorder.eval.data.machine import load_average
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["SLOTS", "Streaming", "StreamingCell", "StreamingRecord", "make_part"]

# Buffers for layers on the device, by policy; None: all that the budget has room for.
SLOTS: dict[str, int | None] = {"no prefetch": 1, "one ahead": 2, "two ahead": 3, "ring": None}


class StreamingCell(SuiteCell):
    """A Llama of so many `layers`, of which `budget_layers` have room on the device, read at `gigabytes_s`; reading and
    computing a layer take up to the share `jitter` more or less. `repeats` turns of `steps` steps are measured."""

    gigabytes_s: float = Field(1.0, gt=0)
    jitter: float = Field(0.0, ge=0, lt=1)
    layers: int = Field(24, ge=2)
    budget_layers: int = Field(4, ge=1)
    hidden_size: int = Field(1024, ge=64, multiple_of=64)
    intermediate_size: int = Field(3264, ge=64)
    repeats: int = Field(3, ge=1)
    steps: int = Field(3, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class StreamingRecord(Record):
    """`rows["step_s"]`: seconds of each step. Facts: `stream_s` and `compute_s`, a step's reading and computing alone;
    `tokens` of a step; `bytes` read, `waits` for layers and `waits_s` a step; `slots`; whether the logits are
    `equal` to those of the first policy."""

    called: ClassVar[str] = "a measurement of streamed weights"
    is_run: ClassVar[bool] = False

    type: Literal["streaming"] = "streaming"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("step_s") or not self.facts.get("stream_s") or not self.facts.get("compute_s"):
            raise ValueError("the times of steps, reading or computing are missing")
        return self

    @property
    def step_s(self) -> float:
        return median(self.rows["step_s"])

    @property
    def bound_s(self) -> float:
        """What no step can be shorter than."""
        return max(float(self.facts["stream_s"]), float(self.facts["compute_s"]))


class Streaming(Experiment):
    kind = "streaming"
    record = StreamingRecord
    cell = StreamingCell
    policies: ClassVar[Any] = tuple(SLOTS)
    unit = "steps"
    one_job = True

    def obstacle(self, suite: Suite, cell: StreamingCell, policy: str) -> str | None:
        if find_spec("torch") is None or find_spec("transformers") is None:
            return f"streamed weights need torch and transformers: {install_hint('torch')}"
        return super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: StreamingCell) -> int:
        return min(cell.steps, self.options.limit or cell.steps)

    def steps(self, job: Job) -> int:
        return len(job.policies) * int(job.cell.repeats) * job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.streaming.measuring import Bench, write_model

        cell: StreamingCell = job.cell
        load = load_average()
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
                "load_average": load,
                "facts": facts[policy],
                "rows": {"step_s": [round(step_s, 5) for step_s in times[policy]]},
            }


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
