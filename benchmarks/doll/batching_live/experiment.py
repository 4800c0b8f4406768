"""Requests within a memory budget in real time: the suites of kind "batching-live"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.doll.batching_live.record import BatchingLiveCell, BatchingLiveRecord
from ragorder.common.extras import install_hint
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["BatchingLive"]


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
        from ragorder.benchmarks.doll.batching_live.measuring import serve_live
        from ragorder.benchmarks.doll.batching_live.parts import LiveParts
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
