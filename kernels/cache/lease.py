"""Lease: the blocks of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragorder.kernels.cache.node import CopyState, DeviceCopy, DeviceLoad
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens
from ragorder.kernels.paging import BlockPool


@dataclass(slots=True, eq=False)
class Borrowed:
    """A document's KV, used at position `start`; an extended lease retains its `blocks`."""

    start: int
    copy: DeviceCopy
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.copy.node.tokens


@dataclass(slots=True, eq=False, repr=False)
class KVLease:
    """A request's cached and own blocks. Only the cache writes it.

    - `cached_tokens`: tokens with KV once `ready`, by tier in `tokens_by_tier`; falls if a load fails.
    - `block_table`: blocks of the first `tokens` tokens, writable from index `writable_from`.
    - `pinned`: nodes of the path, root first, up to token `committed`; the running step writes the `pending` ones.
    - `borrowed`: copies of later documents, read where they are; `tokens` and `block_table` leave them out.
    """

    path: tuple[Segment, ...]
    poll: Callable[[], None]
    block_table: list[int] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    tokens_by_tier: TierTokens = field(default_factory=TierTokens)
    committed: int = 0
    writable_from: int = 0
    pinned: list[DeviceCopy] = field(default_factory=list)
    pending: list[DeviceCopy] = field(default_factory=list)
    borrowed: list[Borrowed] = field(default_factory=list)
    started: bool = False
    counted: bool = False
    closed: bool = False

    @property
    def ready(self) -> bool:
        """Whether all cached KV is on the device. Advances the loads."""
        self.poll()
        # A borrowed copy is read before the step that may be computing it.
        return all(copy.load is None for copy in self.pinned) and not any(
            borrowed.copy.resident and not borrowed.copy.ready for borrowed in self.borrowed
        )

    def wait(self) -> None:
        while (load := self._load_under_way()) is not None:
            load.wait()

    def _load_under_way(self) -> DeviceLoad | None:
        self.poll()
        copies = (*self.pinned, *(borrowed.copy for borrowed in self.borrowed))
        return next((copy.load for copy in copies if copy.load is not None), None)


class BlockTables:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.shape.block_size

    def map(self, lease: KVLease, pinned: list[DeviceCopy]) -> Sequence[DeviceCopy]:
        """Begin the table with blocks of pinned nodes. Return unusable nodes."""
        kept, tokens = self._usable(pinned)
        table: list[int] = []
        for copy in kept:
            # Where two nodes cover a block, the deeper node's has the tokens of both.
            del table[copy.node.start // self._size :]
            table += copy.blocks
        del table[self._pool.shape.blocks_for(tokens) :]
        self._pool.retain(table)
        self._pool.release(lease.block_table)
        lease.pinned = kept
        lease.block_table = table
        lease.writable_from = len(table)
        lease.cached_tokens = lease.tokens = tokens
        lease.tokens_by_tier = TierTokens.of(
            (each.origin, min(each.node.end, tokens) - each.node.start) for each in kept
        )
        lease.committed = kept[-1].node.end if kept else 0
        return pinned[len(kept) :]

    def needed(self, lease: KVLease, tokens: int) -> int:
        missing = self._pool.shape.blocks_for(tokens) - len(lease.block_table)
        return max(0, missing) + self._must_copy(lease)

    def grow(self, lease: KVLease, tokens: int) -> None:
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
        # Whether the next block to write also holds other nodes' later tokens.
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
        # Return the usable nodes and their usable tokens. A partly filled last block will be copied or written to, and
        # a PENDING node's block cannot be copied yet.
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
