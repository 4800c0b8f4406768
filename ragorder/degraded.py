"""Degradations of an orderer: one warning each."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

__all__ = ["Degradations", "DegradedWarning"]


class DegradedWarning(UserWarning):
    """Ordering continues with less than was configured; the message names what is missing."""


class Degradations:
    def __init__(self) -> None:
        self._reasons: dict[str, object] = {}

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    def add(self, reason: str) -> None:
        """Warn at ragorder's caller. Never raises, not even where warnings are errors."""
        mark = object()
        # One atomic step: of two threads, one warns.
        if self._reasons.setdefault(reason, mark) is mark:
            with suppress(Exception):
                warnings.warn(reason, DegradedWarning, stacklevel=_distance_to_caller())


def _distance_to_caller() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ragorder":
        level, frame = level + 1, frame.f_back
    return level
