"""Block tables of leases: the blocks of cached nodes, and those that a lease may write."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.kernels.cache.lease import KVLease
from ragorder.kernels.cache.node import CopyState, DeviceCopy
from ragorder.kernels.cache.stats import TierTokens
from ragorder.kernels.paging import BlockPool

__all__ = ["BlockTables"]


class BlockTables:
    """Changes the tables of leases on one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.shape.block_size

    def map(self, lease: KVLease, pinned: list[DeviceCopy]) -> Sequence[DeviceCopy]:
        """Begin the table with the blocks of pinned nodes, root first; returns those that cannot be used."""
        kept, tokens = self._usable(pinned)
        table: list[int] = []
        for copy in kept:
            # Where two nodes cover a block, the deeper one's has the tokens of both.
            del table[copy.node.start // self._size :]
            table += copy.blocks
        del table[self._pool.shape.blocks_for(tokens) :]
        self._pool.retain(table)
        self._pool.release(lease.block_table)
        by_tier = dict.fromkeys(TierTokens._fields, 0)
        for copy in kept:
            by_tier[copy.origin] += min(copy.node.end, tokens) - copy.node.start
        lease.pinned = kept
        lease.block_table = table
        lease.writable_from = len(table)
        lease.cached_tokens = lease.tokens = tokens
        lease.tokens_by_tier = TierTokens(**by_tier)
        lease.committed = kept[-1].node.end if kept else 0
        return pinned[len(kept) :]

    def needed(self, lease: KVLease, tokens: int) -> int:
        """Free blocks that it takes to grow to `tokens` tokens."""
        missing = self._pool.shape.blocks_for(tokens) - len(lease.block_table)
        return max(0, missing) + self._must_copy(lease)

    def grow(self, lease: KVLease, tokens: int) -> None:
        """Have writable blocks up to `tokens` tokens."""
        place = lease.tokens // self._size
        if self._must_copy(lease):
            [block] = self._pool.allocate(1)
            self._pool.copy(lease.block_table[place], block)
            self._pool.release((lease.block_table[place],))
            lease.block_table[place] = block
        lease.writable_from = min(lease.writable_from, place)
        lease.block_table += self._pool.allocate(self._pool.shape.blocks_for(tokens) - len(lease.block_table))
        lease.tokens = tokens

    def _must_copy(self, lease: KVLease) -> bool:
        # Whether the next block to write holds others' tokens behind those of the lease.
        place = lease.tokens // self._size
        if place >= lease.writable_from:
            return False
        block = lease.block_table[place]
        ours = 1
        for copy in reversed(lease.pinned):
            if copy.resident:
                if copy.blocks[-1] != block:
                    break
                ours += 1
        return self._pool.references(block) > ours

    def _usable(self, pinned: list[DeviceCopy]) -> tuple[list[DeviceCopy], int]:
        # The nodes that can be used, and how many tokens of them: the last block, if only partly filled, will be copied
        # or written to, and a PENDING node's block cannot be copied yet.
        end = pinned[-1].node.end if pinned else 0
        whole = end - end % self._size
        if end == whole:
            return pinned, end
        for place, copy in enumerate(pinned):
            if copy.state is CopyState.PENDING and copy.node.end > whole:
                if copy.node.start > whole:
                    return pinned[:place], copy.node.start
                return [other for other in pinned if other.node.start < whole], whole
        return pinned, end
