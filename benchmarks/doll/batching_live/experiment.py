"""Requests within a memory budget, in real time: serial batches against DecoupledServer (suite doll-live)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.common.served import mean_s, share_column, shorter_column
from ragorder.benchmarks.doll.batching_live.cells import BatchingLiveCell
from ragorder.eval.data.machine import load_average
from ragorder.eval.report.declared import TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.suite import Experiment, Job, Line


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
