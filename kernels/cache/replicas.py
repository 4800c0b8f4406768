"""Host copies of the most used nodes, in case the device fails (RAGCache 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy, HostCopy

__all__ = ["Replicas"]

# Share of the host's blocks; evicted nodes of the device use the rest.
_MOST = 0.5


class Replicas:
    """The `count` most used nodes, pinned in the host. Parents are used at least as often as their children."""

    def __init__(self, count: int, tiers: Hierarchy) -> None:
        self._count = count
        self._tiers = tiers
        self._nodes: dict[bytes, _Replica] = {}
        self._blocks = 0
        self.resize(tiers.host.pool.blocks)

    def __len__(self) -> int:
        return len(self._nodes)

    def offer(self, path: Iterable[DeviceCopy]) -> None:
        if not self._count:
            return
        for copy in path:
            if not copy.ready or copy.entry is None or copy.entry.frequency < 2:
                return
            if not self._replicate(copy.node, len(copy.blocks), copy.entry.frequency):
                return

    def resize(self, host_blocks: int) -> None:
        self._most_blocks = int(_MOST * host_blocks)

    def unpin_all(self) -> None:
        for replica in list(self._nodes.values()):
            self._forget(replica)

    def clear(self) -> None:
        self._nodes.clear()
        self._blocks = 0

    def _replicate(self, node: CachedNode, blocks: int, frequency: int) -> bool:
        replica = self._nodes.get(node.key)
        if replica is not None and replica.copy is node.host:
            replica.frequency = frequency
            return True
        for lost in [each for each in self._nodes.values() if each.node.host is not each.copy]:
            self._forget(lost)
        weaker = self._weaker(blocks, frequency)
        if weaker is None:
            return False
        copy = self._tiers.copy_to_host(node)
        if copy is None:
            return False
        for each in weaker:
            self._forget(each)
        self._tiers.host.tier.pin(node.key)
        self._nodes[node.key] = _Replica(node, copy, len(copy.blocks), frequency)
        self._blocks += len(copy.blocks)
        return True

    def _weaker(self, blocks: int, frequency: int) -> list[_Replica] | None:
        missing_nodes = len(self._nodes) + 1 - self._count
        missing_blocks = self._blocks + blocks - self._most_blocks
        by_use = sorted(self._nodes.values(), key=lambda each: -each.frequency)
        weaker: list[_Replica] = []
        while missing_nodes > 0 or missing_blocks > 0:
            if not by_use:
                return None
            weakest = by_use.pop()
            if weakest.frequency >= frequency:
                # Old uses decay, so that each replica is replaced in the end.
                weakest.frequency -= 1
                return None
            weaker.append(weakest)
            missing_nodes -= 1
            missing_blocks -= weakest.blocks
        return weaker

    def _forget(self, replica: _Replica) -> None:
        del self._nodes[replica.node.key]
        self._blocks -= replica.blocks
        # False if its copy to the host has failed.
        if replica.node.host is replica.copy:
            self._tiers.host.tier.unpin(replica.node.key)


@dataclass(slots=True, eq=False, repr=False)
class _Replica:
    node: CachedNode
    copy: HostCopy
    blocks: int
    frequency: int
