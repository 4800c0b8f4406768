"""Protocol of replacement policies."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ragorder.trie.tree import Key

__all__ = ["Clocked", "ReplacementPolicy", "TierNode"]


class TierNode:
    """A tier's record of a node, written by the tier only.

    `frequency` counts uses, `misses` computations; `cost` is their mean seconds per new token (formula 4's Cost/Size),
    or an estimate. `priority` is of the last use, number `order`. `place`: in a heap, or -1.
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
    """Priorities for one tier: the lowest leaf is evicted first, among equals the least recently used."""

    name: ClassVar[str]

    def priority(self, node: TierNode) -> float:
        """Of a node used or inserted now."""

    def evicted(self, priority: float) -> None:
        """A node with this priority was evicted."""


class Clocked:
    """A clock at the highest evicted priority (formula 3): recent uses outrank frequent old ones."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, priority: float) -> None:
        if priority > self.clock:
            self.clock = priority
