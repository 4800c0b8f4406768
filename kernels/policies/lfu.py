"""Least frequently used."""

from __future__ import annotations

from ragorder.kernels.policies.base import TierNode, policies

__all__ = ["LFU"]


@policies.register("lfu", "least frequently used first")
class LFU:
    """Number of uses."""

    def priority(self, node: TierNode) -> float:
        return float(node.frequency)

    def evicted(self, node: TierNode, used: int) -> None: ...
