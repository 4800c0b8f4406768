"""A mean that follows what changes."""

from __future__ import annotations

__all__ = ["Mean"]

_WEIGHT = 1 / 16


class Mean:
    """The mean of few values, and of many one that forgets the older ones. None before the first."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def learn(self, value: float) -> None:
        self._count += 1
        mean = self.value or 0.0
        self.value = mean + (value - mean) * max(1 / self._count, _WEIGHT)
