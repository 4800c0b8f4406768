"""Arrivals played against a search engine, in real or virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Clock", "RealClock", "System", "VirtualClock", "play"]


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep_until(self, at_s: float) -> None: ...


class RealClock:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start_s

    def sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now()))


class VirtualClock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)

    def spend(self, seconds: float) -> None:
        self._now_s += seconds


class System(Protocol):
    """An engine for searches 0, 1, 2, … that works when it is told to."""

    def submit(self, number: int) -> None: ...

    def step(self, end: Callable[[int], None]) -> bool:
        """Work for a while, and `end` each search at the moment it is final. False: there is none."""


def play(system: System, arrivals_s: Sequence[float], clock: Clock) -> list[float]:
    """Seconds from each search's arrival to its end. What arrives during a step joins after it."""
    ended = [0.0] * len(arrivals_s)
    left = len(arrivals_s)
    following = 0

    def end(number: int) -> None:
        nonlocal left
        ended[number] = clock.now()
        left -= 1

    while left:
        while following < len(arrivals_s) and arrivals_s[following] <= clock.now():
            system.submit(following)
            following += 1
        if not system.step(end) and following < len(arrivals_s):
            clock.sleep_until(arrivals_s[following])
    return [end_s - arrival_s for end_s, arrival_s in zip(ended, arrivals_s, strict=True)]
