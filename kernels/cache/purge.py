"""Removal of nodes whose KV cannot be trusted, and of everything computed behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy
from ragorder.kernels.paging import BlockPool

__all__ = ["purge"]


def purge(tiers: Hierarchy, keys: Iterable[bytes], found: Iterable[bytes] = ()) -> list[DeviceCopy]:
    """Remove nodes, of `found` ones those that are not numbers, and all behind them, from all tiers; returns the copies
    that were on the device.

    Waits for loads, copies and writes that are under way.
    """
    disk = tiers.disk
    tiers.drain()
    if disk is not None:
        disk.wait()
    removed = []
    for key in _with_all_behind(tiers, [*keys, *(key for key in found if _is_broken(tiers, key))]):
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


def _is_broken(tiers: Hierarchy, key: bytes) -> bool:
    """Whether a node's KV in memory is not all numbers; that on the disk alone is not looked at."""
    node = tiers.nodes.get(key)
    if node is None:
        return False
    copies = (tiers.device.pool, node.device), (tiers.host.pool, node.host)
    return any(copy is not None and not _are_numbers(pool, copy.blocks, node) for pool, copy in copies)


def _are_numbers(pool: BlockPool, blocks: Sequence[int], node: CachedNode) -> bool:
    # Others' tokens in the blocks at both ends do not count.
    first = node.start % pool.shape.block_size
    rows = pool.kv[list(blocks)].movedim(3, 1).flatten(0, 1)
    return bool(rows[first : first + node.tokens].isfinite().all())
