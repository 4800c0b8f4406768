"""Replacement policies and their registry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Protocol

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key


@dataclass(slots=True, eq=False, repr=False)
class TierNode:
    """A tier's record of a node; only the tier writes it.

    `frequency` counts uses, `misses` computations. `cost` is the mean of seconds per new token (formula 4's Cost/Size),
    `expected` the last forecast of uses, `priority` that of the last use, number `order`, `place` the index in a heap,
    or -1.
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
    """Priorities for one tier: the lowest leaf is evicted first; ties go to the least recently used."""

    def priority(self, node: TierNode) -> float: ...

    def evicted(self, node: TierNode, used: int) -> None:
        """`used`: total size of the tier's nodes."""


class Clocked:
    """A clock at the highest evicted priority (formula 3): recent uses outrank old ones."""

    def __init__(self) -> None:
        self.clock = 0.0

    def evicted(self, node: TierNode, used: int) -> None:
        if node.priority > self.clock:
            self.clock = node.priority


policies: Registry[ReplacementPolicy] = Registry("replacement policy")


# In simulation 0.3 lost bursts, and 1 lost popular nodes (docs/tiers.md).
_FORGETTING = 0.5
_LEAST_COST = 1e-12


@policies.register("forecast", "as often as the orderer expects them to be used, else as often as they were")
class Forecast:
    """log(Uses x Cost / Size) + 0.5 x Turnovers.

    Uses are the last forecast, else the frequency; they decay by turnovers (evicted over used size) of the tier.
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
    """Clock + Frequency: Greedy-Dual-Size-Frequency with a cost proportional to the size."""

    def priority(self, node: TierNode) -> float:
        return self.clock + node.frequency


@policies.register("lfu", "least frequently used first")
class LFU:
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
        # At every use, as the paper's text says. Algorithm 1 prints line 9 inside the branch for uncached nodes, where
        # hits would never count.
        return self.clock + node.frequency * node.cost


class AwaitedNodes:
    """Nodes on waiting requests' paths, cached or not, of at most `room` in total; oldest requests first."""

    def __init__(self, room: int) -> None:
        self._total = self._room = room
        self._requests: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def resize(self, room: int) -> None:
        self._room += room - self._total
        self._total = room

    def add(self, path: Iterable[tuple[Key, int]]) -> tuple[Key, ...]:
        """Add nodes (key, size), root first, until the room is full; pass the result to `remove` once."""
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
        for key in keys:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._room += self._sizes.pop(key)
