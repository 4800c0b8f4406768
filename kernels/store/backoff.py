"""Leaving a disk alone that fails."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["BackOff"]


class BackOff:
    """Counts failures in a row. After `failures` of them there is a pause of `first_seconds`; whatever fails first
    after a pause brings the next one, twice as long, up to `longest_seconds`. A success ends it all. Not
    thread-safe."""

    def __init__(
        self,
        failures: int = 3,
        first_seconds: float = 5.0,
        longest_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = failures
        self._first_seconds = self._next_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._in_a_row = 0
        self._until = 0.0

    @property
    def pausing(self) -> bool:
        """Whether to leave it alone now."""
        return self._in_a_row >= self._failures and self._clock() < self._until

    @property
    def trying(self) -> bool:
        """Whether what comes next finds out how it is: nothing has failed since the last success or pause."""
        return self._in_a_row == 0 or self._in_a_row >= self._failures

    def failed(self) -> float:
        """Something failed: the seconds of the pause that begins, 0 if none does."""
        if self.pausing:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return 0.0
        seconds = self._next_seconds
        self._until = self._clock() + seconds
        self._next_seconds = min(2 * seconds, self._longest_seconds)
        return seconds

    def succeeded(self) -> bool:
        """Something worked: whether that ends a time of failures with pauses."""
        ends = self._in_a_row >= self._failures
        self._in_a_row = 0
        self._next_seconds = self._first_seconds
        return ends
