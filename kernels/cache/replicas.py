"""Copies in the host of what would be missed most if the device failed (RAGCache section 6)."""

from __future__ import annotations

from collections.abc import Iterable

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy, HostCopy

__all__ = ["Replicas"]


class Replicas:
    """Up to `count` nodes, those that most requests used, are copied to the host before they leave the device, and stay
    there. A node is never used less than what is below it, so these are upper nodes of the tree."""

    def __init__(self, count: int, tiers: Hierarchy) -> None:
        self._count = count
        self._tiers = tiers
        self._nodes: dict[bytes, _Replica] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def offer(self, path: Iterable[DeviceCopy]) -> None:
        """A request has used these, root first."""
        if not self._count:
            return
        for copy in path:
            if not copy.here or not copy.complete or copy.entry is None or copy.entry.frequency < 2:
                return
            self._take(copy.node, copy.entry.frequency)

    def clear(self) -> None:
        """The host holds nothing any more."""
        self._nodes.clear()

    def _take(self, node: CachedNode, frequency: int) -> None:
        nodes, host = self._nodes, self._tiers.host
        # One that could not be copied after all.
        for key in [key for key, replica in nodes.items() if replica.node.host is not replica.there]:
            del nodes[key]
        if node.key in nodes:
            nodes[node.key].frequency = frequency
            return
        weakest = min(nodes, key=lambda key: nodes[key].frequency, default=b"")
        full = len(nodes) >= self._count
        if full and nodes[weakest].frequency >= frequency:
            return
        there = self._tiers.copy_to_host(node)
        if there is None:
            return
        if full:
            del nodes[weakest]
            host.tier.unpin(weakest)
        host.tier.pin(node.key)
        nodes[node.key] = _Replica(node, there, frequency)


class _Replica:
    __slots__ = ("frequency", "node", "there")

    def __init__(self, node: CachedNode, there: HostCopy, frequency: int) -> None:
        self.node = node
        self.there = there
        self.frequency = frequency
