"""What an orderer cannot do at its best: told once as a warning, and kept where it can be looked up."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

__all__ = ["Degradations", "DegradedWarning"]


class DegradedWarning(UserWarning):
    """Ordering goes on, but with less than what was asked for. The message names what is missing."""


class Degradations:
    """Reasons, each told once."""

    def __init__(self) -> None:
        self._reasons: dict[str, object] = {}

    @property
    def reasons(self) -> tuple[str, ...]:
        """In the order in which they were added."""
        return tuple(self._reasons)

    def add(self, reason: str) -> None:
        """Keep a reason and warn of it, at the place that called ragorder. Raises nothing, not even where warnings are
        errors: the serving path adds reasons."""
        mark = object()
        # One atomic step: of two threads, one warns.
        if self._reasons.setdefault(reason, mark) is mark:
            with suppress(Exception):
                warnings.warn(reason, DegradedWarning, stacklevel=_distance_to_caller())


def _distance_to_caller() -> int:
    """The stack level, as seen from the function that asks, of the innermost frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ragorder":
        level, frame = level + 1, frame.f_back
    return level
