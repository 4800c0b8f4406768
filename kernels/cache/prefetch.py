"""Loads for requests that wait, ahead of their leases."""

from __future__ import annotations

from collections.abc import Iterable

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy
from ragorder.kernels.paging import OutOfBlocksError

__all__ = ["prefetch"]


def prefetch(tiers: Hierarchy, nodes: Iterable[CachedNode]) -> list[DeviceCopy]:
    """Begin to load nodes, evicting no pinned or prefetched one; returns the copies, each pinned once."""
    loaded: list[DeviceCopy] = []
    # One by one: a document that stands in two places is loaded once.
    for node in nodes:
        absent = node.device is None
        try:
            copies = tiers.load([node], _Prefetched(tiers))
        except OutOfBlocksError:
            break
        if not copies:
            break
        copies[0].prefetched |= absent
        loaded += copies
    return loaded


class _Prefetched:
    def __init__(self, tiers: Hierarchy) -> None:
        self._nodes = tiers.nodes

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, bytes) else None
        return node is not None and node.device is not None and node.device.prefetched
