"""Pauses after failures in a row."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Pauses attempts for `first_s` seconds after `failures` in a row. Then one attempt is a probe.

    If it fails, the pause is twice as long, up to `longest_s`; a success ends it; without an outcome another probe
    follows after the same time. Failures of attempts begun before the pause make it no longer.
    """

    def __init__(
        self, failures: int, first_s: float, longest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures = failures
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._in_a_row = 0
        self._is_probed = False
        self._until = self._asked_until = clock()

    @property
    def left_s(self) -> float:
        """Seconds left of the pause."""
        return max(0.0, max(self._until, self._asked_until) - self._clock())

    @property
    def is_first(self) -> bool:
        """Whether the next failure is the first since a success or a pause."""
        return self._in_a_row == 0 or self._in_a_row >= self._failures

    def begin(self) -> None:
        """Note an attempt, which may be a probe."""
        if self._in_a_row >= self._failures:
            self._is_probed = True
            self._until = self._clock() + self._pause_s

    def failed(self) -> float:
        """Return the seconds of the pause that this failure begins, or 0."""
        self._in_a_row += 1
        if self._in_a_row == self._failures:
            self._pause_s = self._first_s
        elif self._is_probed:
            self._pause_s = min(2 * self._pause_s, self._longest_s)
        else:
            return 0.0
        self._is_probed = False
        self._until = self._clock() + self._pause_s
        return self._pause_s

    def succeeded(self) -> bool:
        """Return whether this ends a pause after failures."""
        had_failed = self._in_a_row >= self._failures
        self._in_a_row = 0
        self._is_probed = False
        self._until = self._clock()
        return had_failed

    def pause(self, seconds: float) -> None:
        """Pause at least so long, whatever succeeds meanwhile."""
        self._asked_until = max(self._asked_until, self._clock() + seconds)
