"""Memory of nodes outside a tier."""

from __future__ import annotations

from ragorder.kernels.policies.base import TierNode
from ragorder.kernels.policies.heap import NodeHeap
from ragorder.trie.tree import Key

__all__ = ["History"]


class History:
    """Frequency and cost of up to `max_nodes` nodes outside the tier; the least recently used is forgotten first.

    This bound is the paper's "time window", which it does not specify: a node counts from zero once `max_nodes` others
    outside the tier were used since. Time is counted in uses, so a night without requests forgets nothing. Without a
    history the window ends when a node leaves its tier. A history belongs to one tier; a node takes about 0.4 KB.

    Raises ValueError if `max_nodes` is negative; 0 remembers nothing.
    """

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError(f"max_nodes is {max_nodes}: give 0 or more")
        self.max_nodes = max_nodes
        self.owned = False
        self._nodes: dict[Key, TierNode] = {}
        self._by_use = NodeHeap()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def keep(self, node: TierNode) -> None:
        """Remember a node that is neither in the tier nor here."""
        # Equal priorities: the heap keeps the order of use.
        node.priority = 0.0
        self._nodes[node.key] = node
        self._by_use.add(node)
        if len(self._nodes) > self.max_nodes:
            oldest = self._by_use.entries[0][2]
            self._by_use.remove(oldest)
            del self._nodes[oldest.key]

    def take(self, key: Key) -> TierNode | None:
        """Remove and return a node's record; None if it is not remembered."""
        node = self._nodes.pop(key, None)
        if node is not None:
            self._by_use.remove(node)
        return node

    def clear(self) -> None:
        self._nodes.clear()
        self._by_use = NodeHeap()
