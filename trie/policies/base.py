"""Replacement policies of a tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Protocol

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "PGDSF",
    "AwaitedNodes",
    "Clocked",
    "Forecast",
    "ReplacementPolicy",
    "TierNode",
    "policies",
]


@dataclass(slots=True, eq=False, repr=False)
class TierNode:
    """A tier's record of a node, which only the tier writes.

    `frequency` counts uses, `misses` computations; `cost` is their mean seconds per new token (formula 4's Cost/Size),
    or an estimate. `expected`: uses by the last forecast, or 0. `order` numbers the last use. `place` is the index in a
    heap, or -1.
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
    """Priorities for one tier: the leaf with the lowest is evicted first, ties the least recently used."""

    def priority(self, node: TierNode) -> float:
        """Return the priority of a node that is used or inserted now."""

    def evicted(self, node: TierNode, used: int) -> None:
        """Record the eviction of a node from a tier whose nodes have `used` in total."""


class Clocked:
    """A clock that is the highest evicted priority (formula 3), so recent uses outrank frequent old ones."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, node: TierNode, used: int) -> None:
        if node.priority > self.clock:
            self.clock = node.priority


policies: Registry[ReplacementPolicy] = Registry("replacement policy")


# By simulation: 0.3 evicts bursts too early, 1 evicts popular nodes (docs/tiers.md).
_FORGETTING = 0.5
_LEAST_COST = 1e-12


@policies.register("forecast", "evicts nodes with fewest expected uses first; without a forecast by past uses")
class Forecast:
    """log(Uses x Cost / Size) + 0.5 x Turnovers, so uses lose weight with each replacement of the tier's contents.

    Uses are the last forecast's, else the frequency. Turnovers are evicted size by used size, which suits any size and
    speed.
    """

    def __init__(self) -> None:
        self._turnovers = 0.0

    def priority(self, node: TierNode) -> float:
        uses = node.expected or max(node.frequency, 1)
        return log(uses * max(node.cost, _LEAST_COST)) + _FORGETTING * self._turnovers

    def evicted(self, node: TierNode, used: int) -> None:
        self._turnovers += node.size / max(used, 1)


@policies.register("gdsf", "often used nodes last")
class GDSF(Clocked):
    """Clock + Frequency: Greedy-Dual-Size-Frequency with a cost proportional to the size, in any unit."""

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency


@policies.register("lfu", "least frequently used first")
class LFU:
    """Number of uses."""

    def priority(self, node: TierNode) -> float:
        return float(node.frequency)

    def evicted(self, node: TierNode, used: int) -> None: ...


@policies.register("lru", "least recently used first")
class LRU:
    """Order of last use; insertion counts as a use."""

    def __init__(self) -> None:
        self._uses = 0

    def priority(self, node: TierNode) -> float:
        self._uses += 1
        return float(self._uses)

    def evicted(self, node: TierNode, used: int) -> None: ...


@policies.register("pgdsf", "often used and expensive nodes last (RAGCache)")
class PGDSF(Clocked):
    """Prefix-aware Greedy-Dual-Size-Frequency: Clock + Frequency x Cost / Size (formulas 2 and 4)."""

    def priority(self, node: TierNode) -> float:
        # Set at every use, as the paper's text says; Algorithm 1 has line 9 in the branch for uncached nodes, where
        # no hit would ever count.
        return self.clock + node.frequency * node.cost


class AwaitedNodes:
    """Nodes on the paths of waiting requests, present or not, up to `room` in total, earlier requests first.

    awaited = AwaitedNodes(room=100)
    added = awaited.add([("system prompt", 4), ("document", 9)])
    tier.evict(5, protected=awaited)
    awaited.remove(added)
    """

    def __init__(self, room: int) -> None:
        self._total = self._room = room
        self._requests: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def resize(self, room: int) -> None:
        """Change the room. Nodes already awaited stay, even beyond a smaller room."""
        self._room += room - self._total
        self._total = room

    def add(self, path: Iterable[tuple[Key, int]]) -> tuple[Key, ...]:
        """Add the nodes (key, size) of a request, root first, while there is room. Return the keys to `remove`."""
        added = []
        for key, size in path:
            if key not in self._requests:
                if size > self._room:
                    break
                self._room -= size
                self._sizes[key] = size
            self._requests[key] = self._requests.get(key, 0) + 1
            added.append(key)
        return tuple(added)

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove these nodes. Raise KeyError for a node that is not awaited."""
        for key in keys:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._room += self._sizes.pop(key)
