"""Nodes of one tier and their eviction order (RAGCache Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any

from ragorder.trie.policies.base import ReplacementPolicy, TierNode
from ragorder.trie.tree import Key

Entry = tuple[float, int, TierNode]


class _NodeHeap:
    """A binary heap without stale entries: nodes store their index."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    def add(self, node: TierNode) -> None:
        entry = (node.priority, node.order, node)
        self._entries.append(entry)
        self._rise(entry, len(self._entries) - 1)

    def remove(self, node: TierNode) -> None:
        place, node.place = node.place, -1
        last = self._entries.pop()
        if last[2] is not node:
            self._sift(last, place)

    def replace(self, node: TierNode, other: TierNode) -> None:
        place, node.place = node.place, -1
        self._sift((other.priority, other.order, other), place)

    def update(self, node: TierNode) -> None:
        self._sift((node.priority, node.order, node), node.place)

    def _sift(self, entry: Entry, place: int) -> None:
        if place and entry < self._entries[(place - 1) >> 1]:
            self._rise(entry, place)
        else:
            self._sink(entry, place)

    def _rise(self, entry: Entry, place: int) -> None:
        entries = self._entries
        while place:
            above = (place - 1) >> 1
            parent = entries[above]
            if parent < entry:
                break
            entries[place] = parent
            parent[2].place = place
            place = above
        entries[place] = entry
        entry[2].place = place

    def _sink(self, entry: Entry, place: int) -> None:
        entries = self._entries
        count = len(entries)
        while (child := 2 * place + 1) < count:
            below = entries[child]
            if child + 1 < count and entries[child + 1] < below:
                child += 1
                below = entries[child]
            if entry < below:
                break
            entries[place] = below
            below[2].place = place
            place = child
        entries[place] = entry
        entry[2].place = place


class History:
    """Frequency and cost of the last used nodes outside one tier (the paper's "time window"), 0.4 KB per node."""

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError(f"max_nodes is {max_nodes}: give 0 or more")
        self.max_nodes = max_nodes
        self.owned = False
        self._nodes: dict[Key, TierNode] = {}
        self._by_use = _NodeHeap()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def keep(self, node: TierNode) -> None:
        # With equal priorities the heap keeps the order of use.
        node.priority = 0.0
        self._nodes[node.key] = node
        self._by_use.add(node)
        if len(self._nodes) > self.max_nodes:
            oldest = self._by_use.entries[0][2]
            self._by_use.remove(oldest)
            del self._nodes[oldest.key]

    def take(self, key: Key) -> TierNode | None:
        node = self._nodes.pop(key, None)
        if node is not None:
            self._by_use.remove(node)
        return node

    def clear(self) -> None:
        self._nodes.clear()
        self._by_use = _NodeHeap()


NO_FORECAST: Mapping[Any, float] = MappingProxyType({})


class Tier:
    """Metadata of one tier's nodes; `used` is the sum of their sizes. Not thread-safe.

    Keys are hashable and not None; parents may be absent. Without a history, insert a request's nodes before `use`.
    """

    def __init__(self, policy: ReplacementPolicy, history: History | None = None) -> None:
        if history is not None:
            if history.owned:
                raise ValueError("a history belongs to one tier: make another one")
            history.owned = True
        self.used = 0
        self._policy = policy
        self._history = history
        self._nodes: dict[Key, TierNode] = {}
        # Unpinned leaves.
        self._candidates = _NodeHeap()
        # Absent parents, with the number of their children here.
        self._absent_parents: dict[Key, int] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def get(self, key: Key) -> TierNode | None:
        return self._nodes.get(key)

    def use(
        self,
        path: Sequence[Key],
        *,
        cost: float | None = None,
        computed: Container[Key] = (),
        expected: Mapping[Any, float] = NO_FORECAST,
    ) -> None:
        """Count a request along `path`, root first; absent nodes count in the history.

        It computed the nodes `computed` at `cost` seconds per new token (formula 4). `expected`: forecast uses.
        """
        if cost is not None and not 0 <= cost < math.inf:
            raise ValueError(f"cost is {cost} s a token: give a finite number, 0 or more")
        history = self._history
        for key in path:
            node = self._nodes.get(key)
            if node is not None:
                self._count(node, cost, key in computed, expected)
                self._weigh(node)
            elif history is not None:
                node = history.take(key) or TierNode(key)
                self._count(node, cost, key in computed, expected)
                history.keep(node)

    def insert(self, key: Key, size: int = 1, parent: Key | None = None, *, known: TierNode | None = None) -> None:
        """Insert a node, with another tier's record `known` if that has more uses."""
        if key in self._nodes:
            raise ValueError("the node is in this tier already")
        if key == parent:
            raise ValueError("a node cannot be its own parent")
        if size < 0:
            raise ValueError(f"size is {size}: give 0 or more")
        node = (self._history.take(key) if self._history is not None else None) or TierNode(key)
        if known is not None and known.frequency > node.frequency:
            node.frequency, node.misses, node.cost = known.frequency, known.misses, known.cost
            node.expected = known.expected
        node.size, node.parent = size, parent
        node.children = self._absent_parents.pop(key, 0)
        self._nodes[key] = node
        self.used += size
        holder = None
        if parent is not None:
            holder = self._nodes.get(parent)
            if holder is None:
                self._absent_parents[parent] = self._absent_parents.get(parent, 0) + 1
            else:
                holder.children += 1
        self._uses += 1
        node.order = self._uses
        self._weigh(node)
        self._change_candidates(holder, node)

    def remove(self, key: Key) -> None:
        self._take_out(self._nodes[key])

    def pin(self, key: Key) -> None:
        """Protect a node until each `pin` has its `unpin`."""
        node = self._nodes[key]
        node.pins += 1
        self._change_candidates(node, None)

    def unpin(self, key: Key) -> None:
        node = self._nodes[key]
        if not node.pins:
            raise ValueError("the node is not pinned")
        node.pins -= 1
        self._change_candidates(None, node)

    def evict(self, size: int, protected: Container[Key] = (), also_protected: Container[Key] = ()) -> list[Key] | None:
        """Free `size` and return the evicted keys, children first; if impossible evict nothing and return None."""
        evicted: list[TierNode] = []
        freed = 0
        if size > 0:
            for node in self._in_order(protected, also_protected):
                evicted.append(node)
                freed += node.size
                if freed >= size:
                    break
        if freed < size:
            return None
        for node in evicted:
            self._policy.evicted(node, self.used)
            self._take_out(node)
        return [node.key for node in evicted]

    def victims(self) -> Iterator[Key]:
        """Yield keys in eviction order, O(k log k) for the first k. Invalid once the tier changes."""
        return (node.key for node in self._in_order())

    def clear(self) -> None:
        self._nodes.clear()
        self._absent_parents.clear()
        self._candidates = _NodeHeap()
        self.used = 0
        if self._history is not None:
            self._history.clear()

    def _count(self, node: TierNode, cost: float | None, computed: bool, expected: Mapping[Any, float]) -> None:
        self._uses += 1
        node.order = self._uses
        node.frequency += 1
        node.expected = expected.get(node.key, node.expected)
        if cost is None:
            return
        node.misses += computed
        if node.misses == computed:
            # No earlier request computed it.
            node.cost = cost
        elif computed:
            node.cost += (cost - node.cost) / node.misses

    def _weigh(self, node: TierNode) -> None:
        node.priority = self._policy.priority(node)
        if node.place >= 0:
            self._candidates.update(node)

    def _change_candidates(self, before: TierNode | None, now: TierNode | None) -> None:
        if now is not None and (now.children or now.pins):
            now = None
        if before is None or before.place < 0:
            if now is not None:
                self._candidates.add(now)
        elif now is None:
            self._candidates.remove(before)
        else:
            self._candidates.replace(before, now)

    def _take_out(self, node: TierNode) -> None:
        del self._nodes[node.key]
        self.used -= node.size
        if node.children:
            self._absent_parents[node.key] = node.children
        node.children = node.pins = 0
        holder = None
        if node.parent is not None:
            holder = self._nodes.get(node.parent)
            if holder is not None:
                holder.children -= 1
            elif self._absent_parents[node.parent] > 1:
                self._absent_parents[node.parent] -= 1
            else:
                del self._absent_parents[node.parent]
        self._change_candidates(node, holder)
        if self._history is not None:
            self._history.keep(node)

    def _in_order(self, protected: Container[Key] = (), also_protected: Container[Key] = ()) -> Iterator[TierNode]:
        # Nodes in eviction order, read from the heap only when needed.
        entries = self._candidates.entries
        frontier: list[tuple[Entry, int]] = [(entries[0], 0)] if entries else []
        children: dict[Key, int] = {}
        while frontier:
            (_, _, node), place = heappop(frontier)
            if place >= 0:
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(entries):
                        heappush(frontier, (entries[child], child))
            if node.key in protected or node.key in also_protected:
                continue
            yield node
            parent = self._nodes.get(node.parent)
            if parent is not None:
                left = children[parent.key] = children.get(parent.key, parent.children) - 1
                if not left and not parent.pins:
                    heappush(frontier, ((parent.priority, parent.order, parent), -1))
