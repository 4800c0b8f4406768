"""Processor time of the workflow server: the suites of kind "wavefront"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.hedra.wavefront.record import WavefrontCell, WavefrontRecord
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["WavefrontTime"]


class WavefrontTime(Experiment):
    kind = "wavefront"
    record = WavefrontRecord
    cell = WavefrontCell
    policies: ClassVar[Any] = ("stage by stage", "all")
    unit = "repeats"
    packages: ClassVar[Any] = {"numpy": "retrieval"}
    one_job = True

    def steps(self, job: Job) -> int:
        return len(job.policies) * int(job.cell.repeats)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        """Policies take turns."""
        from ragorder.benchmarks.hedra.wavefront.measuring import measure

        cell: WavefrontCell = job.cell.model_copy(update={"requests": job.requests})
        load = load_average()
        times: dict[str, list[float]] = {policy: [] for policy in job.policies}
        facts: dict[str, Any] = {}
        for _ in range(cell.repeats):
            for policy in job.policies:
                ms, facts[policy] = asyncio.run(measure(cell, transformed=policy == "all"))
                times[policy].append(round(ms, 5))
                advance()
        for policy in job.policies:
            rows = {"ms": times[policy]}
            yield {
                "policy": policy,
                "engine": {"name": "played"},
                "load_average": load,
                "facts": facts[policy],
                "rows": rows,
            }
