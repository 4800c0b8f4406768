"""Least frequently used."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import TierNode

__all__ = ["LFU"]


class LFU:
    """The number of uses; of equal ones, the one that was used last stays longest."""

    name: ClassVar[str] = "lfu"

    def priority(self, node: TierNode) -> float:
        return float(node.frequency)

    def evicted(self, priority: float) -> None:
        """Nothing depends on what went."""
