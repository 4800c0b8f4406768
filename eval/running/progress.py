"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "silent"]

Progress = Callable[[str, int], Callable[[], None]]
"""Announces work and the number of its steps; the result is called after each step."""


def silent(description: str, steps: int) -> Callable[[], None]:
    return lambda: None
