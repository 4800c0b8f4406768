"""Capacity of an engine's tiers, shared by all scopes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from ragorder.trie.mirror.tiers import Arrival, TierMirror, TierPriority
from ragorder.trie.residency import Lease, Pool
from ragorder.trie.residency.pool import Holder
from ragorder.trie.tree import Node


class TieredHolder(Holder, Protocol):
    def truncate(self, node: Node, kept_blocks: int) -> None: ...


class TieredPool(Pool):
    """A pool that keeps a node while a tier of `mirror` has it. `nodes_by_key` has the nodes of all scopes.

    A `copy` treats the tiers as one LRU tier of `held_tokens`.
    """

    def __init__(
        self,
        mirror: TierMirror,
        held_tokens: int,
        block_size: int,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
    ) -> None:
        super().__init__(None, block_size, max_nodes, partial_blocks_first)
        self.mirror = mirror
        self.nodes_by_key: dict[Hashable, tuple[TieredHolder, Node]] = {}
        self._block_size = block_size
        self._held_tokens = held_tokens
        self._whole = True

    def copy(self, holder: Holder, copy: Holder, copies: Mapping[Node, Node]) -> Pool:
        pool = super().copy(holder, copy, copies)
        pool.unlimited = False
        pool.capacity_blocks = self._held_tokens // self._block_size
        return pool

    def refresh(self, current: TieredHolder) -> None:
        """Drop everything if an interrupt has left the tiers inconsistent."""
        if self._whole:
            return
        self.mirror.clear()
        for holder, lease in list(self.in_flight):
            self.change(holder, current, holder.cancel, lease)
        for known in dict.fromkeys(known for known, _ in self.nodes_by_key.values()):
            self.change(known, current, known.truncate, known.tree.root, 0)
        self.nodes_by_key.clear()
        self._whole = True

    def serve(
        self,
        lease: Lease,
        path: Sequence[Arrival],
        current: TieredHolder,
        *,
        suffix_tokens: int,
        computed: Collection[Hashable],
        expected: Mapping[Hashable, float],
    ) -> None:
        self._whole = False
        new_tokens = suffix_tokens + sum(each.tokens for each in path) - lease.cached_tokens
        lost = self.mirror.serve(
            lease,
            path,
            cached_tokens=lease.cached_tokens,
            new_tokens=new_tokens,
            suffix_tokens=suffix_tokens,
            computed=computed,
            expected=expected,
        )
        self._drop(lost, current)
        self._whole = True

    def evict_before(
        self,
        priorities: Sequence[TierPriority],
        current: TieredHolder,
        kept: Collection[Hashable],
        only: Collection[Hashable] | None = None,
    ) -> int:
        self._whole = False
        self._drop(self.mirror.evict_before(priorities, kept, only), current)
        self._whole = True
        return self.used_blocks

    def shrink_to(self, blocks: int, current: Holder) -> None:
        excess = self.used_blocks - blocks
        if excess > 0:
            self._whole = False
            self._drop(self.mirror.evict_tokens(excess * self._block_size), current)
            self._whole = True

    def drop(self, holder: TieredHolder, node: Node, current: Holder) -> None:
        used_blocks = self.used_blocks
        self.change(holder, current, holder.truncate, node, 0)
        self.evicted_blocks += used_blocks - self.used_blocks
        if holder is not current:
            self.check_emptied(holder)

    def _drop(self, keys: Iterable[Hashable], current: Holder) -> None:
        for key in keys:
            if key not in self.nodes_by_key:
                # A suffix, room of other clients, or a descendant of a node dropped before.
                continue
            holder, node = self.nodes_by_key[key]
            if holder.closed:
                del self.nodes_by_key[key]
            elif not node.leases:
                self.drop(holder, node, current)
