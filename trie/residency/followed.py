"""Block pool corrected by the engine's KV events."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ragorder.trie.residency.base import Lease
from ragorder.trie.residency.blocks import Content, EngineBlocks
from ragorder.trie.residency.pool import Holder, Pool
from ragorder.trie.tree import Node

_MAX_PENDING = 1024


class Follower(Holder, Protocol):
    """A residency whose nodes have known contents."""

    def settle(self, node: Node, content: Content) -> None:
        """Apply the storage or removal of a node's block."""

    def resynchronise(self) -> None:
        """Look all blocks up again: some may have been evicted without events."""

    def in_doubt(self, node: Node) -> bool: ...

    def reconsider(self, node: Node) -> None: ...

    def truncate(self, node: Node, kept_blocks: int) -> None: ...


class _Pending(NamedTuple):
    """Expected evictions for a request in flight, which will fill a block of content `marker`."""

    lease: Lease
    marker: Content | None
    displaced: list[tuple[Follower, Node]]


class FollowedPool(Pool):
    """Predicts what requests fill and evict, since events arrive late, and is corrected block by block.

    Evicted nodes are `doomed`: hidden in their trees until the engine has begun the request.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        block_size: int,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
        *,
        blocks: EngineBlocks,
    ) -> None:
        super().__init__(capacity_tokens, block_size, max_nodes, partial_blocks_first)
        self.blocks = blocks
        self.changed: dict[Content, None] = {}
        self.watched: dict[Content, tuple[Follower, Node]] = {}
        # Other nodes with a watched content: of documents with the same tokens.
        self.twins: dict[Content, dict[Node, Follower]] = {}
        # With their stamps.
        self.doomed: dict[Node, tuple[Follower, int]] = {}
        self.displaced: list[tuple[Follower, Node]] = []
        self.pending: list[_Pending] = []
        self.nominal_capacity_blocks = self.capacity_blocks
        # Removed blocks of requests in flight, which may fill them again until they end.
        self._unsettled: dict[Content, None] = {}
        self._generation = blocks.generation
        self._epoch = blocks.epoch
        self._ended = False

    def watch(self, holder: Follower, node: Node, content: Content) -> None:
        if content in self.watched:
            self.twins.setdefault(content, {})[node] = holder
        else:
            self.watched[content] = holder, node
        self.blocks.watch(content, self)

    def unwatch(self, node: Node, content: Content) -> None:
        _, first = self.watched.get(content, (None, None))
        twins = self.twins.get(content, {})
        if node in twins:
            del twins[node]
        elif node is first and twins:
            other, holder = twins.popitem()
            self.watched[content] = holder, other
        elif node is first:
            del self.watched[content]
            self.blocks.unwatch(content, self)
        if not twins:
            self.twins.pop(content, None)

    def _places(self, content: Content) -> list[tuple[Follower, Node]]:
        """Return the nodes with a content, and their holders."""
        first = self.watched.get(content)
        twins = [(holder, node) for node, holder in self.twins[content].items()] if content in self.twins else []
        return twins if first is None else [first, *twins]

    def follow(self, current: Holder) -> None:
        if self._generation != self.blocks.generation:
            self._resynchronise(current)
        changed = self.changed
        if not (changed or self._ended):
            return
        # An interrupt may lose news of another scope; then all blocks are looked up again.
        generation, self._generation = self._generation, -1
        while changed:
            content, _ = changed.popitem()
            for holder, node in self._places(content):
                # Doomed nodes are resolved separately.
                if node in self.doomed or (self.blocks.holds(content) and not node.missing):
                    continue
                if node.leases:
                    self._unsettled[content] = None
                else:
                    self.change(holder, current, holder.settle, node, content)
        self._resolve(current)
        self._generation = generation

    def end(self) -> None:
        self._ended = True
        self.changed |= self._unsettled
        self._unsettled.clear()

    def expect_events(self, lease: Lease, marker: Content | None, current: Holder) -> None:
        displaced = [(holder, node) for holder, node in self.displaced if not holder.closed and holder.in_doubt(node)]
        if displaced:
            self.pending.append(_Pending(lease, marker, displaced))
        self.displaced = []
        if len(self.pending) > _MAX_PENDING:
            self._drop([node for _, node in self.pending.pop(0).displaced], current)

    def _resolve(self, current: Holder) -> None:
        self._ended = False
        heard = [pending.marker is not None and self.blocks.holds(pending.marker) for pending in self.pending]
        # An answer may arrive before its events; events of later requests arrive after them.
        last = len(heard) - heard[::-1].index(True) if any(heard) else 0
        waiting = []
        for number, pending in enumerate(self.pending):
            begun = heard[number] or (not pending.lease.open and (number < last or pending.marker is None))
            if not begun:
                waiting.append(pending)
                continue
            # Children were evicted before their parents.
            for holder, node in reversed(pending.displaced):
                self.change(holder, current, holder.reconsider, node)
            self._drop([node for _, node in pending.displaced], current)
        self.pending = waiting

    def _drop(self, nodes: list[Node], current: Holder) -> None:
        for node in nodes:
            if node in self.doomed:
                holder, _ = self.doomed[node]
                self.change(holder, current, holder.truncate, node, 0)

    def _overflow(self, current: Holder) -> bool:
        if self.nodes > self.max_nodes:
            if self.doomed:
                self._drop(list(self.doomed), current)
                return True
        elif self.used_blocks <= self.nominal_capacity_blocks:
            # Other clients must have freed blocks.
            self.capacity_blocks = self.used_blocks
            return True
        return super()._overflow(current)

    def _resynchronise(self, current: Holder) -> None:
        blocks = self.blocks
        epoch, generation, self._generation = blocks.epoch, blocks.generation, -1
        if self._epoch != epoch:
            for holder, lease in list(self.in_flight):
                self.change(holder, current, holder.cancel, lease)
            self._epoch = epoch
        self._drop(list(self.doomed), current)
        self.pending.clear()
        self.capacity_blocks = self.nominal_capacity_blocks
        followers: dict[Follower, None] = {}
        for content in self.watched:
            for follower, node in self._places(content):
                followers[follower] = None
                if node.leases and not blocks.holds(content):
                    self._unsettled[content] = None
        for follower in followers:
            self.change(follower, current, follower.resynchronise)
        self._generation = generation
