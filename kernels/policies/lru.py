"""Least recently used."""

from __future__ import annotations

from ragorder.kernels.policies.base import TierNode, policies

__all__ = ["LRU"]


@policies.register("lru", "least recently used first")
class LRU:
    """Order of last use; entering the tier counts as one."""

    def __init__(self) -> None:
        self._uses = 0

    def priority(self, node: TierNode) -> float:
        self._uses += 1
        return float(self._uses)

    def evicted(self, node: TierNode, used: int) -> None: ...
