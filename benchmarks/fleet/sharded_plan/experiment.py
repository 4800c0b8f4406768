"""Large batches in one plan and in shards: the suites of kind "sharded_plan"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.fleet.sharded_plan.measuring import run_plan
from ragorder.benchmarks.fleet.sharded_plan.record import ShardedPlanCell, ShardedPlanRecord
from ragorder.benchmarks.fleet.sharded_plan.requests import draw, write_requests
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["ShardedPlan"]

_ONE = "one plan"
_TOO_LARGE = "the batch is too large for one plan"
_ROOM = "64GiB"


class ShardedPlan(Experiment):
    kind = "sharded_plan"
    record = ShardedPlanRecord
    cell = ShardedPlanCell
    policies: ClassVar[Any] = (_ONE, "shards")
    unit = "plans"
    one_job = True

    def obstacle(self, suite: Suite, cell: ShardedPlanCell, policy: str) -> str | None:
        if policy == _ONE and self.requests(suite, cell) > cell.one_plan_requests:
            return _TOO_LARGE
        return super().obstacle(suite, cell, policy)

    def missing(self, suite: Suite, cell: ShardedPlanCell, policy: str, reason: str) -> Missing | None:
        return None if reason == _TOO_LARGE else super().missing(suite, cell, policy, reason)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        """Each policy as a run of the command on one file."""
        cell: ShardedPlanCell = job.cell
        with TemporaryDirectory() as name:
            folder = Path(name)
            source = folder / "requests.jsonl"
            write_requests(source, draw(cell.workload, job.requests, job.seed))
            for policy in job.policies:
                load = load_average()
                options = ["--shards", "1", "--workers", "1", "--memory", _ROOM]
                if policy != _ONE:
                    options = ["--shards", str(cell.shards), "--workers", str(cell.workers)]
                manifest, facts = run_plan(source, folder / policy.replace(" ", "-"), *options)
                advance()
                yield {
                    "policy": policy,
                    "engine": {"name": "none"},
                    "load_average": load,
                    "facts": {"requests": manifest["requests"], **facts},
                    "rows": {name: [manifest[name]] for name in ("tokens", "saved_tokens")},
                }
