"""What must not go, for two reasons at once."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["Either"]


class Either:
    """Keys that are in one container or in the other."""

    __slots__ = ("_one", "_other")

    def __init__(self, one: Container[object], other: Container[object]) -> None:
        self._one = one
        self._other = other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
