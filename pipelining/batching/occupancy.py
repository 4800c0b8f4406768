"""Requests that ran beside each other, on average over their time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Occupancy"]

R = TypeVar("R", bound=Hashable)


class Occupancy(Generic[R]):
    """Counts the requests that run, over time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_s = clock()
        # Requests that ran, summed up over time.
        self._area = 0.0
        self._began: dict[R, tuple[float, float]] = {}

    def begin(self, request: R) -> None:
        self._count()
        self._began[request] = self._counted_s, self._area

    def end(self, request: R) -> tuple[int, float] | None:
        """How many ran at a time, itself included, and for how many seconds. None: it had not begun."""
        self._count()
        if (began := self._began.pop(request, None)) is None:
            return None
        began_s, area = began
        seconds = self._counted_s - began_s
        mean = (self._area - area) / seconds if seconds > 0 else 1.0
        return max(1, round(mean)), seconds

    def clear(self) -> None:
        self._began.clear()

    def _count(self) -> None:
        now_s = self._clock()
        self._area += len(self._began) * (now_s - self._counted_s)
        self._counted_s = now_s
