"""Resizing of pools between steps (RAGDoll 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.lease import BlockTables, KVLease
from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.uses import Replicas
from ragorder.kernels.paging import OutOfBlocksError


class PoolSizes:
    def __init__(self, tiers: Hierarchy, replicas: Replicas, leases: Mapping[int, KVLease]) -> None:
        self._tiers = tiers
        self._replicas = replicas
        self._leases = leases

    def resize_device(self, blocks: int) -> None:
        tiers = self._tiers
        pool = tiers.device.pool
        # Loads and copies hold blocks by number.
        tiers.drain()
        if blocks < pool.blocks:
            tiers.make_room(pool.blocks - blocks)
            tiers.drain()
        self._resize_device(blocks)

    def replace_device(self, blocks: int) -> None:
        if self._leases:
            raise ValueError(f"{len(self._leases)} leases hold blocks of the device: discard them first")
        self._tiers.compact(())
        self._tiers.drain()
        self._resize_device(blocks)

    def resize_host(self, blocks: int) -> None:
        tiers = self._tiers
        pool = tiers.host.pool
        tiers.drain()
        if blocks < pool.blocks:
            self._replicas.unpin_all()
            if not tiers.make_host_room(pool.blocks - blocks):
                raise OutOfBlocksError(
                    f"{pool.used_blocks} blocks of the host are in use: it cannot shrink to {blocks}"
                )
            tiers.drain()
        moves = pool.resize(blocks)
        self._replicas.resize(blocks)
        tiers.awaited.resize(blocks * pool.shape.block_size // 2)
        if moves:
            for node in tiers.nodes.values():
                if node.host is not None:
                    node.host.blocks = [moves.get(block, block) for block in node.host.blocks]

    def _resize_device(self, blocks: int) -> None:
        moves = self._tiers.device.pool.resize(blocks)
        if not moves:
            return
        for node in self._tiers.nodes.values():
            if node.device is not None:
                node.device.blocks = [moves.get(block, block) for block in node.device.blocks]
        for lease in self._leases.values():
            lease.block_table = [moves.get(block, block) for block in lease.block_table]
            for borrowed in lease.borrowed:
                borrowed.blocks = [moves.get(block, block) for block in borrowed.blocks]


def load_prefix(tiers: Hierarchy, path: Sequence[Segment], *, alone: bool) -> list[DeviceCopy]:
    """Pin a path's cached prefix and load absent nodes; if `alone`, the part that fits. Raises OutOfBlocksError,
    changing nothing."""
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
    try:
        tiers.make_room(tables.needed(lease, tokens))
    except OutOfBlocksError:
        if not alone:
            raise
        tiers.compact(lease.pinned)
        tiers.make_room(tables.needed(lease, tokens))
