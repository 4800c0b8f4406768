"""Circuit breaker for a failing disk."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens for `first_seconds` after `failures` consecutive failures, then twice as long after each further one, up to
    `longest_seconds`. A success resets it. Not thread-safe."""

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
    def open(self) -> bool:
        return self._in_a_row >= self._failures and self._clock() < self._until

    @property
    def probing(self) -> bool:
        """Whether the next attempt is the first since a success or an opening."""
        return self._in_a_row == 0 or self._in_a_row >= self._failures

    def failed(self) -> float:
        """Return the seconds for which this failure opens the breaker, or 0."""
        if self.open:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return 0.0
        seconds = self._next_seconds
        self._until = self._clock() + seconds
        self._next_seconds = min(2 * seconds, self._longest_seconds)
        return seconds

    def succeeded(self) -> bool:
        """Return whether the breaker had opened."""
        reset = self._in_a_row >= self._failures
        self._in_a_row = 0
        self._next_seconds = self._first_seconds
        return reset
