"""Speed of this machine now, which processor times are compared with."""

from __future__ import annotations

from time import thread_time

__all__ = ["step_time_s"]

_STEPS = 200_000


def step_time_s() -> float:
    """Return the processor's seconds for one step of a loop in Python: the least of five tries."""
    return min(_steps_s() for _ in range(5)) / _STEPS


def _steps_s() -> float:
    counts: dict[int, int] = {}
    started = thread_time()
    for step in range(_STEPS):
        counts[step & 1023] = step
    return thread_time() - started
