"""Protocol of replacement policies, and their registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key

__all__ = ["Clocked", "ReplacementPolicy", "TierNode", "policies"]


@dataclass(slots=True, eq=False, repr=False)
class TierNode:
    """A tier's record of a node, written by the tier only.

    `frequency` counts uses, `misses` computations; `cost` is their mean seconds per new token (formula 4's Cost/Size),
    or an estimate. `expected` uses are forecast by the last request that did so; 0: none. `priority` is of the last
    use, number `order`. `place`: in a heap, or -1.
    """

    key: Key
    parent: Key | None = None
    size: int = 0
    frequency: int = 0
    misses: int = 0
    cost: float = 0.0
    expected: float = 0.0
    priority: float = 0.0
    order: int = 0
    children: int = 0
    pins: int = 0
    place: int = -1


class ReplacementPolicy(Protocol):
    """Priorities for one tier: the lowest leaf is evicted first, among equals the least recently used."""

    def priority(self, node: TierNode) -> float:
        """Of a node used or inserted now."""

    def evicted(self, node: TierNode, used: int) -> None:
        """A node is evicted from a tier whose nodes have `used` in all."""


class Clocked:
    """A clock at the highest evicted priority (formula 3): recent uses outrank frequent old ones."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, node: TierNode, used: int) -> None:
        if node.priority > self.clock:
            self.clock = node.priority


policies: Registry[ReplacementPolicy] = Registry("replacement policy")
