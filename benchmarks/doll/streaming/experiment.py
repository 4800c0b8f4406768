"""Steps with streamed weights: the suites of kind "streaming"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.doll.streaming.record import SLOTS, StreamingCell, StreamingRecord
from ragorder.common.extras import install_hint
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Streaming"]


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
        from ragorder.benchmarks.doll.streaming.measuring import Bench
        from ragorder.benchmarks.doll.streaming.model import write_model

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
