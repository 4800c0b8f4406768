"""Requests within a memory budget in real time: the suites of kind "batching-live"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from ragorder.benchmarks.doll.batching.experiment import checked_steps
from ragorder.common.extras import install_hint
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["BatchingLive", "BatchingLiveCell", "BatchingLiveRecord", "make_part"]


class BatchingLiveCell(SuiteCell):
    """Requests that arrive in `steps`, played `scale` times as fast as the paper's. A step streams the weights of
    `layers` in `step_s`, a pass over `partitions` of `vectors` reads them in `pass_s`: seconds of the paper's scale. KV
    has room for `most` requests if nothing is shared, and for `serial_most` where no partitions lie beside it."""

    steps: Annotated[str, AfterValidator(checked_steps)] = "steps:4@20m,8@20m,12@20m,16@20m"
    scale: float = Field(60.0, gt=0)
    step_s: float = Field(6.9, gt=0)
    pass_s: float = Field(303.0, gt=0)
    most: int = Field(48, ge=1)
    serial_most: int = Field(64, ge=1)
    layers: int = Field(8, ge=2)
    hidden_size: int = Field(128, ge=64, multiple_of=64)
    partitions: int = Field(32, ge=1)
    vectors: int = Field(20_000, ge=1000)
    dimensions: int = Field(32, ge=1)
    top_k: int = Field(5, ge=1)
    document_words: int = Field(16, ge=1)
    documents: int = Field(400, ge=10)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps, time_scale=self.scale)


class BatchingLiveRecord(Record):
    """`rows`: seconds from each request's arrival to its answer. Facts: seconds until the last; share of the layers
    that a step read; seconds of a pass as it was read; of a step, and of one beside reading (medians; None: no such
    step); prompt tokens and cached ones."""

    called: ClassVar[str] = "a run within a memory budget, in real time"
    facts_needed: ClassVar[tuple[str, ...]] = ("total_s", "prompt_tokens", "cached_tokens")

    type: Literal["batching-live"] = "batching-live"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_s",)

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])


class BatchingLive(Experiment):
    kind = "batching-live"
    record = BatchingLiveRecord
    cell = BatchingLiveCell
    policies: ClassVar[Any] = ("serial", "decoupled")
    unit = "runs"
    one_job = True

    def obstacle(self, suite: Suite, cell: BatchingLiveCell, policy: str) -> str | None:
        if find_spec("faiss") is None:
            return f"searches need faiss: {install_hint('retrieval')}"
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: BatchingLiveCell) -> int:
        count = cell.arrivals.count or 0
        return min(count, self.options.limit or count)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching_live.measuring import LiveParts, serve_live
        from ragorder.benchmarks.kernels.embedded.clocks import threads

        cell: BatchingLiveCell = job.cell
        at_s = [each.at_s for each in cell.arrivals.draw(job.requests, job.seed)]
        with TemporaryDirectory(prefix="ragorder-batching-") as folder:
            parts = LiveParts.make(cell, Path(folder), job.requests, job.seed)
            for policy in job.policies:
                load = load_average()
                with threads(1):
                    found = asyncio.run(serve_live(policy, parts, at_s))
                yield {"policy": policy, "engine": {"name": "torch"}, "load_average": load, **found}
                advance()


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
