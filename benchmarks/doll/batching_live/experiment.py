"""Requests within a memory budget, in real time: serial batches against DecoupledServer (suite doll-live)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from ragorder.benchmarks.common.served import mean_s, share_column, shorter_column
from ragorder.benchmarks.doll.batching.experiment import checked_steps
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.report.declared import TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["BatchingLive", "BatchingLiveCell"]


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

    @property
    def requests(self) -> int:
        return self.arrivals.count or 0


class BatchingLive(Experiment):
    """Column `latency_s`: from each request's arrival to its answer. Facts: seconds until the last; share of the layers
    that a step read; seconds of a pass as it was read; of a step, and of one beside reading (medians; None: no such
    step); prompt tokens and cached ones."""

    kind = "batching-live"
    cell = BatchingLiveCell
    columns = ("latency_s",)
    facts = ("total_s", "prompt_tokens", "cached_tokens")
    runs = True
    policies: ClassVar[Any] = ("serial", "decoupled")
    unit = "runs"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval", "torch": "torch", "transformers": "torch"}
    one_job = True
    tables = (
        TableForm(
            lambda block: f"Mean latency, {block.cell.requests:,} requests, {block.cell.scale:g} times as fast",
            [
                policy_column("", {"serial": "serial static batches", "decoupled": "DecoupledServer, ordered"}),
                figure("mean, s", mean_s),
                shorter_column("times shorter", "serial"),
                figure("longest, s", lambda run: max(run.rows["latency_s"]), over=max),
                figure("last answer, s", "total_s"),
                share_column("cached, %", "cached_tokens", "prompt_tokens"),
                # Both systems are to have the same cores, engine and disk: facts that show it.
                figure("layers read a step", "streamed", 3),
                figure("a pass as read, s", "pass_s", 3),
                figure("a step, s", "step_s", 3),
                figure("beside reading, s", "beside_s", 3),
            ],
            note=lambda block: (
                f"Weights of {block.cell.layers} layers stream in "
                f"{format_number(block.cell.step_s / block.cell.scale, 3)} s a step, partitions in "
                f"{format_number(block.cell.pass_s / block.cell.scale, 2)} s a pass: the paper's times with 70B on "
                "PF-High, by the scale."
            ),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching_live.measuring import LiveParts, serve_live
        from ragorder.benchmarks.kernels.embedded.models import threads

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
