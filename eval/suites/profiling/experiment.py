"""Prefill times of a server: the suites of kind "profile"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.profiling.record import ProfileCell, ProfileRecord

__all__ = ["Profiling"]


class Profiling(Experiment):
    kind = "profile"
    record = ProfileRecord
    cell = ProfileCell
    policies: ClassVar[Any] = ("prefill",)

    def obstacle(self, suite: Suite, cell: ProfileCell, policy: str) -> str | None:
        return None if self.options.engine == "openai" else "prefill times are those of a server: use --engine openai"

    def missing(self, suite: Suite, cell: ProfileCell, policy: str, reason: str) -> Missing:
        return Missing(suite.name, {}, policy, reason)

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.suites.profiling.measuring import measure_profile, plan_grid, profiled_server

        cell: ProfileCell = job.cell
        load = load_average()
        options = self.options
        with profiled_server(
            options.base_url,
            model=options.model,
            served_model=options.served_model,
            api_key=options.api_key,
            block_size=cell.block_size,
        ) as server:
            grid = plan_grid(server, cell.cached, cell.new)
            made = measure_profile(server, grid, repeats=cell.repeats, seed=job.seed, progress=self.progress)
        yield {
            "policy": "prefill",
            "engine": {"name": "openai", "model": server.model, "block_size": server.block_size},
            "load_average": load,
            "facts": made.facts,
            "rows": ProfileRecord.rows_of(made),
        }
