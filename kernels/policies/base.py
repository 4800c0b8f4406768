"""What a replacement policy must tell: how much a node is worth to its tier."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ragorder.trie.tree import Key

__all__ = ["Clocked", "ReplacementPolicy", "TierNode"]


class TierNode:
    """A node of the knowledge tree as one tier knows it: a document, or a chunk of one, behind a particular prefix.

    `size` is in the tier's unit (tokens, bytes or chunks). `frequency` counts the requests that used the node, and
    `misses` those of them that had to compute it; `cost` is the mean, over these, of the seconds that a new token took
    (formula 4's Cost/Size; without any, an estimate, or 0 where there is none). `priority` was set at the last use,
    which was the tier's use number `order`. Of a node that is in the tier, `children` are in the tier, too, and `pins`
    hold it there; `place` is where a heap has it, -1 if none has. Only the tier writes any of these.
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
    """Gives nodes their priorities: of the leaves, the one with the lowest goes first; equal ones go in the order of
    their last use. An instance serves one tier, as a clock (formula 3) is one tier's."""

    name: ClassVar[str]

    def priority(self, node: TierNode) -> float:
        """The node is used, or comes into the tier, and this is its priority from now on."""

    def evicted(self, priority: float) -> None:
        """A node with this priority was evicted."""


class Clocked:
    """A clock that starts at zero and goes on to the highest priority that was evicted (formula 3), so that what is
    used now stands above what has not been used for long, however often that was."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, priority: float) -> None:
        """Clock = max(Clock, priority)."""
        if priority > self.clock:
            self.clock = priority
