"""KV held by a knowledge base and its users' uploads: the suites of kind "fused-storage"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.fusion.fused_storage.measuring import POLICIES, measure
from ragorder.benchmarks.fusion.fused_storage.record import StorageCell, StorageRecord
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["FusedStorage"]


class FusedStorage(Experiment):
    kind = "fused-storage"
    record = StorageRecord
    cell = StorageCell
    policies: ClassVar[Any] = POLICIES

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        for policy in job.policies:
            rows = measure(job.cell, policy, job.requests, job.seed, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, "rows": rows}
