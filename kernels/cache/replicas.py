"""Host copies of the most used nodes, against a failing device (RAGCache 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy, HostCopy

__all__ = ["Replicas"]


class Replicas:
    """The `count` most used nodes, pinned in the host. Parents are used at least as often."""

    def __init__(self, count: int, tiers: Hierarchy) -> None:
        self._count = count
        self._tiers = tiers
        self._nodes: dict[bytes, _Replica] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def offer(self, path: Iterable[DeviceCopy]) -> None:
        if not self._count:
            return
        for copy in path:
            if not copy.ready or copy.entry is None or copy.entry.frequency < 2:
                return
            self._replicate(copy.node, copy.entry.frequency)

    def clear(self) -> None:
        self._nodes.clear()

    def _replicate(self, node: CachedNode, frequency: int) -> None:
        nodes, host = self._nodes, self._tiers.host
        # Drop replicas whose copy to the host failed.
        for key in [key for key, replica in nodes.items() if replica.node.host is not replica.copy]:
            del nodes[key]
        if node.key in nodes:
            nodes[node.key].frequency = frequency
            return
        weakest = min(nodes, key=lambda key: nodes[key].frequency, default=b"")
        full = len(nodes) >= self._count
        if full and nodes[weakest].frequency >= frequency:
            return
        copy = self._tiers.copy_to_host(node)
        if copy is None:
            return
        if full:
            del nodes[weakest]
            host.tier.unpin(weakest)
        host.tier.pin(node.key)
        nodes[node.key] = _Replica(node, copy, frequency)


@dataclass(slots=True, eq=False, repr=False)
class _Replica:
    node: CachedNode
    copy: HostCopy
    frequency: int
