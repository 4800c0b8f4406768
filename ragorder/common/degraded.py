"""Degradations of an orderer, with one warning each."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress


class DegradedWarning(UserWarning):
    """Ordering continues with less than was configured."""


class Degradations:
    def __init__(self) -> None:
        self._reasons: dict[str, object] = {}

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    def add(self, reason: str) -> None:
        """Warn at ragorder's caller. Never raises, even if warnings are errors."""
        mark = object()
        # `setdefault` is atomic, so only one of two threads warns.
        if self._reasons.setdefault(reason, mark) is mark:
            with suppress(Exception):
                warnings.warn(reason, DegradedWarning, stacklevel=_distance_to_caller())


def _distance_to_caller() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ragorder":
        level, frame = level + 1, frame.f_back
    return level
