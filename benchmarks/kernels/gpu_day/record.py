"""The cell and the record of a GPU day."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.kernels.gpu_day.parts import MINUTES
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["GpuDayCell", "GpuDayRecord"]


class GpuDayCell(SuiteCell):
    """A day of `minutes` in calls of at most `call_minutes`. `small`: each part in a form that a CPU measures in
    seconds, which checks the day and says nothing about a GPU."""

    small: bool = False
    minutes: float = Field(MINUTES, gt=0)
    call_minutes: float = Field(9.5, gt=0)

    @property
    def fields(self) -> dict[str, Any]:
        # A day goes on in calls of any length.
        return {"small": self.small}

    @property
    def varies_with_seed(self) -> bool:
        return False


class GpuDayRecord(Record):
    """A part that has ended: `rows["seconds"]` of each of its jobs, and in the facts how many jobs are `left`, for want
    of time. With a `policy` such as "kernel, job 3", the seconds of one job of a part. What was measured is in the
    records of the suites."""

    called: ClassVar[str] = "a part of a GPU day"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("part",)

    type: Literal["gpu-day"] = "gpu-day"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("seconds",)

    @property
    def seconds(self) -> float:
        return float(sum(self.rows["seconds"]))

    @property
    def ended(self) -> bool:
        """Whether this is a part, and not one of its jobs."""
        return self.policy == str(self.facts["part"])
