"""Rests of a replica: those that its server asks for, and those after failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ragorder.adapters.proxy.upstream import UpstreamError

__all__ = ["RefusedError", "Rests", "rest_asked"]

# Failures in a row after which a replica rests, and for how long: twice as long after each one that follows a rest.
_FAILURES = 5
_SHORTEST_S = 1.0
_LONGEST_S = 60.0
# A mistaken Retry-After must not cost a replica for a day.
_LONGEST_ASKED_S = 600.0
_ASKS = (429, 503)


class RefusedError(UpstreamError):
    """The server asks for a rest (Retry-After)."""


class Rests:
    """Says how long a replica is to get no requests, if others are left.

    A server that answers with 429 or 503 and Retry-After rests that long, ten minutes at most. After five failures in a
    row (500, 502, 503, 504, broken connections) it rests a second. Then one request tries it; if that fails it rests
    twice as long, up to a minute. Any other answer ends this.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_until = self._failed_until = clock()
        self._failures = 0
        self._rest_s = _SHORTEST_S
        self._is_tried = False

    @property
    def left_s(self) -> float:
        """0: it does not rest."""
        return max(0.0, max(self._asked_until, self._failed_until) - self._clock())

    def ask(self, seconds: float) -> None:
        self._asked_until = max(self._asked_until, self._clock() + min(seconds, _LONGEST_ASKED_S))

    def taken(self) -> None:
        """It gets a request; after failures no other one for as long as it rested."""
        if self._failures >= _FAILURES:
            self._is_tried = True
            self._failed_until = self._clock() + self._rest_s

    def failed(self) -> None:
        self._failures += 1
        if self._failures == _FAILURES:
            self._rest_s = _SHORTEST_S
        elif self._failures > _FAILURES and self._is_tried:
            self._rest_s = min(2 * self._rest_s, _LONGEST_S)
        else:
            # Too few, or requests that were sent before the rest.
            return
        self._is_tried = False
        self._failed_until = self._clock() + self._rest_s

    def succeeded(self) -> None:
        self._failures = 0
        self._is_tried = False
        self._failed_until = self._clock()


def rest_asked(status: int, retry_after: str) -> float | None:
    """Seconds, from an answer's status and Retry-After (a number of seconds, or a date); None if it asks for none."""
    if status not in _ASKS:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # A date without a zone is one in UTC, as "-0000" says.
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
