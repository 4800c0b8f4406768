"""Residency from the engine's KV events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ragorder.trie.residency.base import Lease, RequestedDocuments, TokenIds
from ragorder.trie.residency.blocks import Content, EngineBlocks, PathContents, chain_root, pack_tokens
from ragorder.trie.residency.discovery import discover
from ragorder.trie.residency.lru import LRUResidency, UseEntry
from ragorder.trie.tree import KnowledgeTree, Node

__all__ = ["EventsResidency"]


_MAX_PENDING = 1024


class _Pending(NamedTuple):
    """Expected evictions for a request in flight; `marker`: content of a block that it will fill."""

    lease: Lease
    marker: Content | None
    displaced: list[Node]


class EventsResidency(LRUResidency):
    """The mirror of the block pool, corrected block by block by the engine's events.

    Events are late: the mirror predicts what requests that the engine has not begun will fill and displace.
    `prefix_ids` are the tokens before the documents, `salt` is the tenant's `cache_salt`. Documents with unknown tokens
    are followed by the mirror alone.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        capacity_tokens: int | None,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
        *,
        blocks: EngineBlocks,
        prefix_ids: TokenIds,
        salt: str | None = None,
    ) -> None:
        super().__init__(tree, capacity_tokens, max_nodes, partial_blocks_first)
        self.changed: dict[Content, None] = {}
        self._blocks = blocks
        self._generation = blocks.generation
        self._epoch = blocks.epoch
        self._events_seen = self._closed = False
        self._nominal_capacity_blocks = self.capacity_blocks
        self._contents: dict[Node, PathContents] = {}
        self._watched: dict[Content, Node] = {}
        # Nodes that requests in flight will displace, with their stamps: they stay in the tree until the engine has.
        self._doomed: dict[Node, int] = {}
        self._pending: list[_Pending] = []
        self._displaced: list[Node] = []
        self._evict = self._doom
        self._remove = self._remove_watched
        root = tree.root
        if len(prefix_ids) == root.end:
            self._learn(root, PathContents(chain_root(salt)).extend(pack_tokens(prefix_ids), tree.block_size))

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        self._apply_events()
        if requested is not None and requested.token_ids:
            for served in list(discover(self.tree, self._blocks, self._contents, self._watched, requested)):
                self._adopt(self.tree.insert(requested.keys, requested.tokens, served.ranks), served.contents)

    def _apply_events(self) -> None:
        if self._generation != self._blocks.generation:
            self._resynchronise()
        changed = self.changed
        if not (changed or self._closed):
            return
        self._events_seen = self._events_seen or bool(changed)
        while changed:
            content, _ = changed.popitem()
            node = self._watched.get(content)
            # A request in flight fills again what it lost; doomed nodes are resolved separately.
            if node is not None and not node.leases and node not in self._doomed:
                self._correct(node, content)
        self._resolve()

    def lease(self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = ()) -> Lease:
        contents = self._contents
        for node, ids in zip(path[1:], token_ids, strict=False):
            if node not in contents and node.parent in contents and len(ids) == node.end - node.parent.end:
                self._learn(node, contents[node.parent].extend(pack_tokens(ids), self.tree.block_size))
        for node in path:
            if node.missing or not node.stamp:
                if node.stamp or node in self._doomed or node not in contents:
                    break
                self.mark_held(node, self._held_blocks(node))
                if node.missing:
                    break
                # Its last use is unknown: a report about it says nothing about others.
                node.stamp = -1
        if self._doomed:
            for node in path:
                self._doomed.pop(node, None)
        known = contents.get(path[-1])
        marker = known.last if known is not None and not self._blocks.holds(known.last) else None
        evicted_blocks = self.evicted_blocks
        lease = super().lease(path, suffix_tokens)
        if self.evicted_blocks > evicted_blocks:
            self._expect_events(lease, marker)
        return lease

    def release(
        self,
        lease: Lease,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        prompt_tokens: float | None = None,
    ) -> None:
        evicted_blocks = self.evicted_blocks
        super().release(lease, cached_tokens, total_tokens)
        self._closed = True
        if self.evicted_blocks > evicted_blocks:
            self._expect_events(lease, None)

    def cancel(self, lease: Lease) -> None:
        path = lease.path
        super().cancel(lease)
        if self._events_seen:
            # What it lost while in flight is not filled again.
            for node in path:
                if node in self._contents:
                    self.changed.update(dict.fromkeys(self._contents[node].blocks))

    def _expect_events(self, lease: Lease, marker: Content | None) -> None:
        if self._log and self._log[0].node.missing:
            self._displaced.append(self._log[0].node)
        displaced = [
            node
            for node in self._displaced
            if node in self._doomed or (node in self._contents and self._held_blocks(node))
        ]
        self._displaced = []
        if displaced:
            self._pending.append(_Pending(lease, marker, displaced))
        if len(self._pending) > _MAX_PENDING:
            for node in self._pending.pop(0).displaced:
                self._drop(node)

    def holds(self, node: Node) -> bool:
        if node in self._contents and not node.leases:
            return self._held_blocks(node) == node.blocks
        return super().holds(node)

    def correct(self, lease: Lease) -> int | None:
        """Only without events about the request: these are exact."""
        if any(node in self._contents and self._held_blocks(node) for node in lease.path):
            return None
        return super().correct(lease)

    def close(self) -> None:
        for content in self._watched:
            self._blocks.unwatch(content, self)

    def _learn(self, node: Node, contents: PathContents) -> None:
        self._contents[node] = contents
        for content in contents.blocks:
            self._watched[content] = node
            self._blocks.watch(content, self)

    def _adopt(self, path: Sequence[Node], contents: Sequence[PathContents]) -> None:
        for node, known in zip(path[1:], contents, strict=True):
            if node not in self._contents:
                self._learn(node, known)
        stamp = next(self._clock)
        used_blocks = self.used_blocks
        end = path[0]
        for end in path:
            self._doomed.pop(end, None)
            if not end.leases:
                self.mark_held(end, self._held_blocks(end))
                end.stamp = stamp
            if end.missing:
                break
        self._append(end, stamp, 0)
        # Nodes evicted in the meantime.
        for node in reversed(path):
            if not (node.stamp or node.children):
                self._remove(node)
        # It takes the room of evicted blocks of ours.
        room = self.capacity_blocks + self.used_blocks - used_blocks
        self.capacity_blocks = max(self.capacity_blocks, min(room, self._nominal_capacity_blocks))
        if self.tree.size > self.max_nodes:
            self._make_room()

    def _held_blocks(self, node: Node) -> int:
        holds = self._blocks.holds
        count = 0
        for content in self._contents[node].blocks:
            if not holds(content):
                break
            count += 1
        return count

    def _correct(self, node: Node, content: Content) -> None:
        if not self._blocks.holds(content):
            position = self._contents[node].blocks.index(content)
            if position < node.blocks - node.missing:
                # Another client took the room: the capacity shrinks.
                used_blocks = self.used_blocks
                self.truncate(node, position)
                self.capacity_blocks = max(0, self.capacity_blocks - used_blocks + self.used_blocks)
        elif node.missing and (node.parent is None or not node.parent.missing):
            self.mark_held(node, self._held_blocks(node))
            if node.parent is None:
                # Another client computed the system prompt: it ages like anything else.
                self._append(node, node.stamp, 0)

    def _doom(self, node: Node) -> None:
        """Evict a node in the mirror; the engine's decision shows once it has begun the request."""
        in_doubt = node.children or (node in self._contents and self._held_blocks(node))
        if in_doubt and self.tree.size <= self.max_nodes:
            self._doomed[node] = node.stamp
            self._displaced.append(node)
            node.missing = node.blocks
            node.stamp = 0
        else:
            # Only doomed nodes, which hold nothing, can be below it.
            for each in reversed(list(self.tree.walk(node))):
                self._remove(each)

    def _overflow(self) -> bool:
        if self.used_blocks <= self._nominal_capacity_blocks and self.tree.size <= self.max_nodes:
            # Other clients must have given room back.
            self.capacity_blocks = self.used_blocks
            return True
        return super()._overflow()

    def _resolve(self) -> None:
        self._closed = False
        heard = [pending.marker is not None and self._blocks.holds(pending.marker) for pending in self._pending]
        # An answer may precede its events; those of a request that began later follow them.
        last = len(heard) - heard[::-1].index(True) if any(heard) else 0
        waiting = []
        for number, pending in enumerate(self._pending):
            begun = heard[number] or (not pending.lease.open and (number < last or pending.marker is None))
            if not begun:
                waiting.append(pending)
                continue
            # Parents were displaced after their children.
            for node in reversed(pending.displaced):
                self._reconsider(node)
            for node in pending.displaced:
                self._drop(node)
        self._pending = waiting

    def _reconsider(self, node: Node) -> None:
        if node not in self._contents or node.leases or (node.parent is not None and node.parent.missing):
            return
        held = self._held_blocks(node)
        found = held - node.blocks + node.missing
        if found > 0:
            self.mark_held(node, held)
            self.capacity_blocks += found
        stamp = self._doomed.get(node)
        if stamp is not None and (held or not node.blocks):
            del self._doomed[node]
            node.stamp = stamp
            self._log.appendleft(UseEntry(node, stamp, 0))

    def _drop(self, node: Node) -> None:
        if node in self._doomed:
            self.truncate(node, 0)

    def _drop_doomed(self) -> None:
        for node in list(self._doomed):
            self._drop(node)
        self._pending.clear()

    def _resynchronise(self) -> None:
        blocks = self._blocks
        self._generation = blocks.generation
        if self._epoch != blocks.epoch:
            self._epoch = blocks.epoch
            for lease in self._in_flight:
                self.cancel(lease)
        self._drop_doomed()
        self.capacity_blocks = self._nominal_capacity_blocks
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            stack += (node.children or {}).values()
            # A request in flight fills again what it lost.
            if node in self._contents and not node.leases:
                held_blocks = self._held_blocks(node)
                if held_blocks < node.blocks - node.missing:
                    self.truncate(node, held_blocks)

    def _remove_watched(self, node: Node) -> None:
        # The root stays.
        if node.parent is None:
            return
        self._doomed.pop(node, None)
        contents = self._contents.pop(node, None)
        if contents is not None:
            for content in contents.blocks:
                if self._watched.get(content) is node:
                    del self._watched[content]
                    self._blocks.unwatch(content, self)
        self.tree.remove(node)
        # Several entries of the log may lead to a node that had been put back.
        node.stamp = 0
