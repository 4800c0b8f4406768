"""Running mean."""

from __future__ import annotations

_WEIGHT = 1 / 16


class RunningMean:
    """Exponentially weighted mean with weight 1/16. `value` is None before the first.

    With `arithmetic_start` the first 16 values have equal weight.
    """

    __slots__ = ("_count", "_start", "value")

    def __init__(self, *, arithmetic_start: bool = False) -> None:
        self.value: float | None = None
        self._count = 0
        self._start = arithmetic_start

    def add(self, value: float) -> None:
        self._count += 1
        weight = max(1 / self._count, _WEIGHT) if self._start else _WEIGHT
        mean = value if self.value is None else self.value
        self.value = mean + (value - mean) * weight
