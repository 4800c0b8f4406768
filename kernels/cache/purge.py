"""Removal of nodes whose KV cannot be trusted, and of everything computed behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import DeviceCopy

__all__ = ["purge"]


def purge(tiers: Hierarchy, keys: Iterable[bytes]) -> list[DeviceCopy]:
    """Remove nodes, and all behind them, from all tiers; returns the copies that were on the device.

    Waits for loads, copies and writes that are under way.
    """
    disk = tiers.disk
    tiers.drain()
    if disk is not None:
        disk.wait()
    removed = []
    for key in _with_all_behind(tiers, keys):
        node = tiers.nodes.get(key)
        if node is not None and (copy := tiers.drop(node)) is not None:
            removed.append(copy)
        if disk is not None:
            disk.remove(key)
    return removed


def _with_all_behind(tiers: Hierarchy, keys: Iterable[bytes]) -> Iterable[bytes]:
    parents = {key: node.parent for key, node in tiers.nodes.items()}
    if tiers.disk is not None:
        parents |= tiers.disk.parents()
    children = defaultdict(list)
    for key, parent in parents.items():
        children[parent].append(key)
    found: dict[bytes, None] = {}
    left = list(keys)
    while left:
        key = left.pop()
        if key not in found:
            found[key] = None
            left += children[key]
    return found
