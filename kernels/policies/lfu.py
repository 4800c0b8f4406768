"""Least frequently used."""

from __future__ import annotations

from typing import ClassVar

from ragorder.kernels.policies.base import TierNode

__all__ = ["LFU"]


class LFU:
    """Number of uses."""

    name: ClassVar[str] = "lfu"

    def priority(self, node: TierNode) -> float:
        return float(node.frequency)

    def evicted(self, priority: float) -> None: ...
