"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import TierNode

__all__ = ["LRU"]


class LRU:
    """Order of last use; entering the tier counts as one."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._uses = 0

    def priority(self, node: TierNode) -> float:
        self._uses += 1
        return float(self._uses)

    def evicted(self, priority: float) -> None: ...
