"""Protocol of replacement policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from ragorder.trie.tree import Key

__all__ = ["Clocked", "ReplacementPolicy", "TierNode"]


@dataclass(slots=True, eq=False, repr=False)
class TierNode:
    """A tier's record of a node, written by the tier only.

    `frequency` counts uses, `misses` computations; `cost` is their mean seconds per new token (formula 4's Cost/Size),
    or an estimate. `priority` is of the last use, number `order`. `place`: in a heap, or -1.
    """

    key: Key
    parent: Key | None = None
    size: int = 0
    frequency: int = 0
    misses: int = 0
    cost: float = 0.0
    priority: float = 0.0
    order: int = 0
    children: int = 0
    pins: int = 0
    place: int = -1


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
