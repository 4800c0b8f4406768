"""Fleets of simulated replicas: the suites of kind "replicas"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.fleet.replicas.measuring import serve
from ragorder.benchmarks.fleet.replicas.record import ReplicasCell, ReplicasRecord
from ragorder.benchmarks.fleet.replicas.routers import ROUTERS
from ragorder.eval.data.trace import Trace, trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Replicas"]

_TOP_K = 5


class Replicas(Experiment):
    kind = "replicas"
    record = ReplicasRecord
    cell = ReplicasCell
    policies: ClassVar[Any] = tuple(ROUTERS)

    def obstacle(self, suite: Suite, cell: ReplicasCell, policy: str) -> str | None:
        if self.options.engine != "sim":
            return "fleets are simulated: run it without --engine"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ReplicasCell = job.cell
        requests = _trace(job).requests
        warmup = min(job.suite.warmup, len(requests) // 4)
        for policy in job.policies:
            found = serve(requests, cell, policy, job.seed, warmup, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, **found}


def _trace(job: Job) -> Trace:
    cell: ReplicasCell = job.cell
    if job.corpus is not None:
        top_k = cell.top_k or _TOP_K
        return trace_of_corpus(job.corpus, top_k=top_k, order="random", seed=job.seed, limit=job.requests)
    assert cell.workload is not None
    drawn = make_workload(cell.workload, job.seed, top_k=cell.top_k, requests=job.requests)
    return trace_of_workload(drawn, job.requests)
