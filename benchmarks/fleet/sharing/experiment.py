"""Processes in front of one engine: the suites of kind "sharing"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.fleet.sharing.measuring import BLOCK_SIZE, serve
from ragorder.benchmarks.fleet.sharing.record import SharingCell, SharingRecord
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["Sharing"]

_OWN = "own orders"
_SHARED = "shared orders"
_MEASURED_ONCE = "nothing is shared: it does not matter how late"


class Sharing(Experiment):
    kind = "sharing"
    record = SharingRecord
    cell = SharingCell
    policies: ClassVar[Any] = (_OWN, _SHARED)

    def obstacle(self, suite: Suite, cell: SharingCell, policy: str) -> str | None:
        if self.options.engine != "sim":
            return "the engine is simulated: run it without --engine"
        if cell.late and (policy == _OWN or cell.processes == 1):
            return _MEASURED_ONCE
        return None

    def missing(self, suite: Suite, cell: SharingCell, policy: str, reason: str) -> Missing | None:
        return None if reason == _MEASURED_ONCE else super().missing(suite, cell, policy, reason)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: SharingCell = job.cell
        workload = make_workload(cell.workload, job.seed, requests=job.requests)
        requests = trace_of_workload(workload, job.requests).requests
        warmup = min(job.suite.warmup, len(requests) // 4)
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "sim", "block_size": BLOCK_SIZE},
                "rows": serve(requests, cell, job.seed, warmup, advance, shared=policy == _SHARED),
            }
