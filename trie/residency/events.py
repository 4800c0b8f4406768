"""Residency that follows the engine's KV events."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from ragorder.trie.histories import TurnEnd
from ragorder.trie.residency.base import Lease, Loads, Reported, TierLevel
from ragorder.trie.residency.blocks import Content, EngineBlocks, PathContents, chain_root, pack_tokens
from ragorder.trie.residency.followed import FollowedPool
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.pool import UseEntry
from ragorder.trie.tree import KnowledgeTree, Node, RequestedDocuments, TokenIds

_BUDGET = 256


class ServedPath(NamedTuple):
    """Ranks of consecutive documents and their contents; the engine holds all but the last completely."""

    ranks: tuple[int, ...] = ()
    contents: tuple[PathContents, ...] = ()


def discover(
    tree: KnowledgeTree,
    blocks: EngineBlocks,
    known: Mapping[Node, PathContents],
    taken: Container[Content],
    requested: RequestedDocuments,
) -> Iterator[ServedPath]:
    """Yield paths of the request's documents that the engine holds but the tree does not, in at most 256 look-ups.

    `known` has the contents of the tree's nodes, `taken` their blocks.
    """
    top = known.get(tree.root)
    if top is None or (top.blocks and not blocks.holds(top.last)):
        return
    size, keys = tree.block_size, requested.keys
    heads = {
        rank: pack_tokens(ids[:size])
        for rank, (ids, length) in enumerate(zip(requested.token_ids, requested.tokens, strict=True))
        # An empty document fills no block.
        if len(ids) == length > 0
    }
    budget = _BUDGET
    stack: list[tuple[ServedPath, PathContents, Node | None]] = [(ServedPath(), top, tree.root)]
    while stack and budget > 0:
        path, end, node = stack.pop()
        children = node.children or {} if node is not None else {}
        further: list[tuple[ServedPath, PathContents, Node | None]] = []
        for rank, head in heads.items():
            if rank in path.ranks:
                continue
            child = children.get(keys[rank])
            if child is not None:
                if child in known and not child.missing:
                    further.append((_extend(path, rank, known[child]), known[child], child))
                continue
            budget -= 1
            first = end.first_block(head, size)
            # The engine stores documents of equal tokens once, and the tree already has that one.
            if first is not None and (first in taken or not blocks.holds(first)):
                continue
            extended = end.extend(pack_tokens(requested.token_ids[rank]), size)
            longer = _extend(path, rank, extended)
            if first is not None:
                yield longer
            if all(map(blocks.holds, extended.blocks)):
                further.append((longer, extended, None))
        stack += reversed(further)


def _extend(path: ServedPath, rank: int, contents: PathContents) -> ServedPath:
    return ServedPath((*path.ranks, rank), (*path.contents, contents))


class EventsResidency(LRUResidency):
    """The nodes of one scope's tree that the engine holds, by the contents of its blocks.

    `prefix_ids` precede the documents. Documents without tokens use the mirror alone.
    """

    pool: FollowedPool
    knows_tokens = True

    def __init__(
        self, tree: KnowledgeTree, pool: FollowedPool, *, prefix_ids: TokenIds, salt: str | None = None
    ) -> None:
        super().__init__(tree, pool)
        self._blocks = pool.blocks
        self._contents: dict[Node, PathContents] = {}
        root = tree.root
        if len(prefix_ids) == root.end:
            self._learn(root, PathContents(chain_root(salt)).extend(pack_tokens(prefix_ids), tree.block_size))

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        pool = self.pool
        pool.follow(self)
        if requested is not None and requested.token_ids:
            for served in list(discover(self.tree, self._blocks, self._contents, pool.watched, requested)):
                self._adopt(self.tree.insert(requested.keys, requested.tokens, served.ranks), served.contents)

    def lease(
        self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = (), turn: TurnEnd | None = None
    ) -> Lease:
        contents = self._contents
        for node, ids in zip(path[1:], token_ids, strict=False):
            if node not in contents and node.parent in contents and len(ids) == node.end - node.parent.end:
                self._learn(node, contents[node.parent].extend(pack_tokens(ids), self.tree.block_size))
        for node in path:
            if node.missing or not node.stamp:
                if node.stamp or node in self.pool.doomed or node not in contents:
                    break
                self.mark_held(node, self._held_blocks(node))
                if node.missing:
                    break
                # Its last use is unknown, so a report about it does not apply to other nodes.
                node.stamp = -1
        pool = self.pool
        if pool.doomed:
            for node in path:
                pool.doomed.pop(node, None)
        known = contents.get(path[-1])
        marker = known.last if known is not None and not self._blocks.holds(known.last) else None
        evicted_blocks = pool.evicted_blocks
        lease = super().lease(path, suffix_tokens, turn=turn)
        if pool.evicted_blocks > evicted_blocks:
            self._expect_events(lease, marker)
        return lease

    def release(self, lease: Lease, *reported: Reported, **named: Reported) -> None:
        evicted_blocks = self.pool.evicted_blocks
        super().release(lease, *reported, **named)
        self.pool.end()
        if self.pool.evicted_blocks > evicted_blocks:
            self._expect_events(lease, None)

    def cancel(self, lease: Lease) -> None:
        super().cancel(lease)
        self.pool.end()

    def _expect_events(self, lease: Lease, marker: Content | None) -> None:
        pool = self.pool
        next_use = pool.log[0] if pool.log else None
        if next_use is not None and isinstance(next_use.holder, EventsResidency) and next_use.node.missing:
            pool.displaced.append((next_use.holder, next_use.node))
        pool.expect_events(lease, marker, self)

    def in_doubt(self, node: Node) -> bool:
        return node in self.pool.doomed or (node in self._contents and self._held_blocks(node) > 0)

    def holds(self, node: Node) -> bool:
        if node in self._contents and not node.leases:
            return self._held_blocks(node) == node.blocks
        return super().holds(node)

    def loads(self, node: Node) -> Loads:
        contents = self._contents.get(node)
        if contents is None:
            return Loads()
        held = contents.blocks[: node.blocks - node.missing]
        places = [self._blocks.place(content) for content in held]
        return Loads(places.count(TierLevel.HOST), places.count(TierLevel.DISK))

    def serve(self, path: Sequence[Node], lease: Lease, expected_uses: Callable[[], Sequence[float]]) -> None:
        """Do nothing: events report where blocks are."""

    def correct(self, lease: Lease, *, alone: bool = False) -> int | None:
        if any(node in self._contents and self._held_blocks(node) for node in lease.path):
            return None
        return super().correct(lease, alone=alone)

    def close(self) -> None:
        super().close()
        for node in list(self._contents):
            self._unlink(node)

    def _learn(self, node: Node, contents: PathContents) -> None:
        self._contents[node] = contents
        for content in contents.blocks:
            self.pool.watch(self, node, content)

    def _unlink(self, node: Node) -> None:
        self.pool.doomed.pop(node, None)
        if node in self._contents:
            for content in self._contents.pop(node).blocks:
                self.pool.unwatch(node, content)

    def _adopt(self, path: Sequence[Node], contents: Sequence[PathContents]) -> None:
        for node, known in zip(path[1:], contents, strict=True):
            if node not in self._contents:
                self._learn(node, known)
        pool = self.pool
        stamp = next(pool.clock)
        used_blocks = self.used_blocks
        end = path[0]
        for end in path:
            pool.doomed.pop(end, None)
            if not end.leases:
                self.mark_held(end, self._held_blocks(end))
                end.stamp = stamp
            if end.missing:
                break
        pool.append(UseEntry(self, end, stamp, 0))
        # Nodes evicted in the meantime.
        for node in reversed(path):
            if not (node.stamp or node.children):
                self._remove(node)
        # Its blocks replace evicted blocks of this orderer.
        room = pool.capacity_blocks + self.used_blocks - used_blocks
        pool.capacity_blocks = max(pool.capacity_blocks, min(room, pool.nominal_capacity_blocks))
        pool.count(self)
        if pool.nodes > pool.max_nodes:
            pool.make_room(self)

    def _held_blocks(self, node: Node) -> int:
        holds = self._blocks.holds
        count = 0
        for content in self._contents[node].blocks:
            if not holds(content):
                break
            count += 1
        return count

    def _follows_held(self, node: Node) -> bool:
        """Return whether the parent is held; a doomed one is not, even without blocks."""
        parent = node.parent
        return parent is None or not (parent.missing or parent in self.pool.doomed)

    def settle(self, node: Node, content: Content) -> None:
        if not self._blocks.holds(content):
            position = self._contents[node].blocks.index(content)
            if position < node.blocks - node.missing:
                # Another client uses the room, so the capacity shrinks.
                used_blocks = self.used_blocks
                self.truncate(node, position)
                pool = self.pool
                pool.capacity_blocks = max(0, pool.capacity_blocks - used_blocks + self.used_blocks)
        elif node.missing and self._follows_held(node):
            self.mark_held(node, self._held_blocks(node))
            if node.parent is None:
                # Another client computed the system prompt, which ages like other nodes.
                self.pool.append(UseEntry(self, node, node.stamp, 0))

    def _evict(self, node: Node) -> None:
        pool = self.pool
        nodes = pool.nodes - self.counted_nodes + self.tree.size
        if nodes <= pool.max_nodes and (node.children or (node in self._contents and self._held_blocks(node))):
            pool.doomed[node] = self, node.stamp
            pool.displaced.append((self, node))
            node.missing = node.blocks
            node.stamp = 0
        else:
            # All descendants are doomed nodes without blocks.
            for each in reversed(list(self.tree.walk(node))):
                self._remove(each)

    def _evict_root(self, root: Node) -> None:
        # The root is not doomed: it stays, and another client's events about it count at once.
        super()._evict_root(root)
        self.pool.displaced.append((self, root))

    def reconsider(self, node: Node) -> None:
        if node not in self._contents or node.leases or not self._follows_held(node):
            return
        pool = self.pool
        held = self._held_blocks(node)
        found = held - node.blocks + node.missing
        if found > 0:
            if node.parent is None and node.missing == node.blocks:
                pool.log.appendleft(UseEntry(self, node, node.stamp, 0))
            self.mark_held(node, held)
            pool.capacity_blocks = max(pool.capacity_blocks, pool.used_blocks + found)
        if node in pool.doomed and (held or not node.blocks):
            _, stamp = pool.doomed.pop(node)
            node.stamp = stamp
            pool.log.appendleft(UseEntry(self, node, stamp, 0))

    def resynchronise(self) -> None:
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            stack += (node.children or {}).values()
            if node in self._contents and not node.leases:
                held_blocks = self._held_blocks(node)
                if held_blocks < node.blocks - node.missing:
                    self.truncate(node, held_blocks)

    def _remove(self, node: Node) -> None:
        # The root stays.
        if node.parent is None:
            return
        self._unlink(node)
        self.tree.remove(node)
