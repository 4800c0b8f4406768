"""What is remembered of nodes that a tier does not hold."""

from __future__ import annotations

from ragorder.kernels.policies.base import TierNode
from ragorder.kernels.policies.heap import NodeHeap
from ragorder.trie.tree import Key

__all__ = ["History"]


class History:
    """Frequency and cost of up to `max_nodes` nodes outside a tier; what was used longest ago is forgotten first.

    The paper counts retrievals "within a time window" and does not say which. This bound is the window: a node outside
    the tier is forgotten once so many others outside it were used since, and counts from zero when it comes back. What
    the tier holds is never forgotten. Time is thus counted in uses, not in seconds, and a night without requests
    forgets nothing. Without a history the window ends when a node leaves its tier.

    A history belongs to one tier. A node takes about 0.4 KB.
    Raises ValueError if `max_nodes` is negative; 0 remembers nothing.
    """

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 0:
            raise ValueError(f"a history of {max_nodes} nodes cannot be: give 0 or more")
        self.max_nodes = max_nodes
        self.owned = False
        self._nodes: dict[Key, TierNode] = {}
        self._by_use = NodeHeap()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def keep(self, node: TierNode) -> None:
        """Remember a node that the tier does not hold, and that is not remembered already."""
        # Equal ones stand in the order of use.
        node.priority = 0.0
        self._nodes[node.key] = node
        self._by_use.add(node)
        if len(self._nodes) > self.max_nodes:
            oldest = self._by_use.entries[0][2]
            self._by_use.remove(oldest)
            del self._nodes[oldest.key]

    def take(self, key: Key) -> TierNode | None:
        """What is remembered of a node, which is the caller's now; None if nothing is."""
        node = self._nodes.pop(key, None)
        if node is not None:
            self._by_use.remove(node)
        return node

    def clear(self) -> None:
        """Forget all."""
        self._nodes.clear()
        self._by_use = NodeHeap()
