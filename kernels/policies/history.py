"""Memory of nodes outside a tier."""

from __future__ import annotations

from ragorder.kernels.policies.base import TierNode
from ragorder.kernels.policies.heap import NodeHeap
from ragorder.trie.tree import Key

__all__ = ["History"]


class History:
    """Frequency and cost of the `max_nodes` last used nodes outside one tier: the paper's "time window", in uses.

    About 0.4 KB a node. Raises ValueError if `max_nodes` is negative.
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
        # Equal priorities: the heap keeps the order of use.
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
        self._by_use = NodeHeap()
