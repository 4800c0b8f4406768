"""Requests within a memory budget, in real time (suites doll-live, doll-live-topk, doll-live-index)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.doll.batching_live.cells import POLICIES, BatchingLiveCell
from ragorder.eval.running.load import rotated
from ragorder.eval.running.suite import Experiment, Job, Line


class BatchingLive(Experiment):
    """Columns: of each request its arrival, its latency, and the seconds of each part. Facts: seconds until the last
    answer; prompt tokens and cached ones; share of the layers that a step read; seconds of a pass as it was read; of a
    step, and of one beside reading (medians; None: no such step); moves of the placement, and its `trace`; `recall` of
    the index."""

    kind = "batching-live"
    cell = BatchingLiveCell
    columns = ("latency_s", "at_s", "waiting_s", "retrieval_s", "generation_s")
    facts = ("total_s", "prompt_tokens", "cached_tokens", "moves", "trace", "recall")
    runs = True
    policies: ClassVar[Any] = tuple(POLICIES)
    unit = "runs"
    counts = "policies"
    packages: ClassVar[Any] = {
        "faiss": "retrieval",
        "torch": "torch",
        "transformers": "torch",
        "prometheus_client": "live",
    }
    one_job = True

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching_live.parts import LiveParts
        from ragorder.benchmarks.doll.batching_live.serving import serve_live
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: BatchingLiveCell = job.cell
        at_s = [each.at_s for each in cell.arrivals.draw(job.requests, job.seed)]
        with TemporaryDirectory(prefix="ragorder-batching-") as folder:
            parts = LiveParts.make(cell, Path(folder), job.requests, job.seed)
            # Each seed begins with another policy.
            for policy in rotated(job.policies, job.seed):
                with threads(1):
                    found = asyncio.run(serve_live(policy, parts, at_s))
                yield {"policy": policy, "engine": {"name": "torch"}, **found}
                advance()
