"""The time of a GPU day: what a call has left, and each part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ragorder.benchmarks.kernels.gpu_day.parts import MINUTES, PARTS
from ragorder.benchmarks.kernels.gpu_day.record import GpuDayCell

__all__ = ["DayClock"]

_FIRST_JOB = 0.25
"""Of a part's time: what its first job is expected to take."""


@dataclass
class DayClock:
    """Of one call, from its beginning; parts shrink and grow with the day. `spent_s`: of each part, in earlier calls
    too."""

    cell: GpuDayCell
    now: Callable[[], float] = time.monotonic
    spent_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.now()
        self._measured = False

    @property
    def call_left_s(self) -> float:
        return 60 * self.cell.call_minutes - (self.now() - self._began)

    def part_left_s(self, part: str) -> float:
        whole_s = 60 * PARTS[part].minutes * self.cell.minutes / MINUTES
        return whole_s - sum(self.spent_s.get(part, ()))

    def ended(self, part: str) -> bool:
        """Whether the part has no time for another job like its longest."""
        left_s = self.part_left_s(part)
        return left_s <= 0 or left_s < max(self.spent_s.get(part, ()), default=0.0)

    def has_time(self, part: str) -> bool:
        """For another job of the part in this call. The first job of a call is always begun: a longer one would be in
        none."""
        expected_s = max(self.spent_s.get(part, ()), default=_FIRST_JOB * 60 * PARTS[part].minutes)
        return not self._measured or self.call_left_s > expected_s

    def took(self, part: str, seconds: float) -> None:
        self._measured = True
        self.spent_s.setdefault(part, []).append(seconds)
