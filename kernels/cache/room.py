"""Room on the device for a lease. No other lease will free blocks for a lone one: it gets the whole pool."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.lease import KVLease
from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.tables import BlockTables
from ragorder.kernels.paging import OutOfBlocksError

__all__ = ["load_prefix", "make_room"]


def load_prefix(tiers: Hierarchy, path: Sequence[Segment], *, alone: bool) -> list[DeviceCopy]:
    """The cached prefix of a path, pinned, and loads of what is absent; `alone` as much of it as fits. Raises
    OutOfBlocksError, changing nothing."""
    nodes = tiers.match(path)
    try:
        return tiers.load(nodes)
    except OutOfBlocksError:
        if not alone:
            raise
    tiers.compact([node.device for node in nodes if node.device is not None])
    nodes = tiers.match(path)
    while True:
        try:
            return tiers.load(nodes)
        except OutOfBlocksError:
            nodes.pop()


def make_room(tiers: Hierarchy, tables: BlockTables, lease: KVLease, tokens: int, *, alone: bool) -> None:
    """Have the free blocks in which a lease grows to `tokens` tokens. Raises OutOfBlocksError, changing nothing."""
    try:
        tiers.make_room(tables.needed(lease, tokens))
    except OutOfBlocksError:
        if not alone:
            raise
        tiers.compact(lease.pinned)
        tiers.make_room(tables.needed(lease, tokens))
