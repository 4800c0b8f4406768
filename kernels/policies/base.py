"""Protocol of replacement policies."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ragorder.trie.tree import Key

__all__ = ["Clocked", "ReplacementPolicy", "TierNode"]


class TierNode:
    """A tier's record of a node. Written by the tier only.

    `frequency` counts uses, `misses` the requests that computed it; `cost` is their mean seconds per new token (formula
    4's Cost/Size), or an estimate. `priority` was set at the last use, number `order`. `children` and `pins` count in
    the tier; `place` is its place in a heap, or -1.
    """

    __slots__ = (
        "children",
        "cost",
        "frequency",
        "key",
        "misses",
        "order",
        "parent",
        "pins",
        "place",
        "priority",
        "size",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parent: Key | None = None
        self.size = 0
        self.frequency = 0
        self.misses = 0
        self.cost = 0.0
        self.priority = 0.0
        self.order = 0
        self.children = 0
        self.pins = 0
        self.place = -1


class ReplacementPolicy(Protocol):
    """Priorities of nodes: the leaf with the lowest is evicted first, among equals the least recently used. One
    instance serves one tier, as a clock (formula 3) is a tier's."""

    name: ClassVar[str]

    def priority(self, node: TierNode) -> float:
        """The new priority of a node that is used or enters the tier."""

    def evicted(self, priority: float) -> None:
        """Note the eviction of a node with this priority."""


class Clocked:
    """A clock at the highest evicted priority (formula 3): recent uses outrank frequent ones of long ago."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, priority: float) -> None:
        if priority > self.clock:
            self.clock = priority
