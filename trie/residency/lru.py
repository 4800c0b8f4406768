"""Residency that mirrors one scope's part of an engine's block pool."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.histories import AnswerKey, TurnEnd
from ragorder.trie.residency.base import Lease, Reported
from ragorder.trie.residency.pool import Pool, UseEntry
from ragorder.trie.tree import KnowledgeTree, Node, RequestedDocuments, TokenIds


class LRUResidency:
    """The nodes of one scope's tree that the engine holds. `knows_tokens`: reports do not teach lengths."""

    knows_tokens = False

    def __init__(self, tree: KnowledgeTree, pool: Pool) -> None:
        self.tree = tree
        self.pool = pool
        self.used_blocks = 0
        self.counted_nodes = self.counted_blocks = 0
        self.whole = True
        self.closed = False

    def copy(self) -> LRUResidency:
        tree, copies = self.tree.copy()
        mirror = LRUResidency(tree, self.pool)
        mirror.used_blocks = self.used_blocks
        mirror.pool = self.pool.copy(self, mirror, copies)
        return mirror

    def close(self) -> None:
        self.pool.detach(self)

    def refresh(self, requested: RequestedDocuments | None = None) -> None: ...

    def lease(
        self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = (), turn: TurnEnd | None = None
    ) -> Lease:
        block_size = self.tree.block_size
        stamp = next(self.pool.clock)
        documents_end = path[-1].end
        documents_blocks = documents_end // block_size
        held_end = documents_blocks * block_size
        held = previous_stamp = 0
        for node in path:
            if node.missing or not node.stamp:
                break
            held += 1
            previous_stamp = 0 if node.leases else node.stamp
            node.leases += 1
            node.stamp = stamp
        new_blocks = 0
        if held < len(path):
            held_end = (path[held].end // block_size - path[held].missing) * block_size
            for node in path[held:]:
                node.provisional = missing = node.missing
                new_blocks += missing
                node.missing = 0
                node.leases += 1
                node.stamp = stamp
        end = documents_end + suffix_tokens
        suffix_blocks = end // block_size - documents_blocks
        partial_blocks = 1 if end % block_size else 0
        self.used_blocks += new_blocks + suffix_blocks + partial_blocks
        cached_documents = held - 1 if held else 0
        lease = Lease(path, stamp, suffix_blocks, partial_blocks, cached_documents, held_end, previous_stamp, turn=turn)
        self.pool.begin(self, lease)
        return lease

    def release(
        self,
        lease: Lease,
        cached_tokens: Reported = None,
        total_tokens: Reported = None,
        prompt_tokens: Reported = None,
    ) -> None:
        if not lease.open:
            return
        lease.open = False
        pool = self.pool
        if total_tokens is not None:
            self._count_answer(lease, total_tokens)
            pool.count(self)
            if pool.used_blocks > pool.capacity_blocks:
                pool.make_room(self)
        stamp = next(pool.clock)
        path = lease.path if lease.turn is None else self._end_turn(lease, lease.turn, total_tokens)
        for node in path:
            node.leases -= 1
            node.provisional = 0
            node.stamp = stamp
        suffix_blocks = lease.suffix_blocks
        if pool.partial_blocks_first:
            self.used_blocks -= lease.partial_blocks
        else:
            suffix_blocks += lease.partial_blocks
        if pool.unlimited:
            self.used_blocks -= suffix_blocks
            suffix_blocks = 0
        pool.append(UseEntry(self, path[-1], stamp, suffix_blocks))
        pool.count(self)
        lease.path = ()
        if total_tokens is not None and pool.used_blocks > pool.capacity_blocks:
            # The request alone exceeds the cache: its head stays.
            pool.make_room(self)

    def _count_answer(self, lease: Lease, total_tokens: float) -> None:
        """Count the reported tokens without the last, whose KV is never computed."""
        block_size, documents_end = self.tree.block_size, lease.path[-1].end
        kept_tokens = max(documents_end, int(total_tokens) - 1)
        suffix_blocks = kept_tokens // block_size - documents_end // block_size
        partial_blocks = 1 if kept_tokens % block_size else 0
        self.used_blocks += suffix_blocks + partial_blocks - lease.suffix_blocks - lease.partial_blocks
        lease.suffix_blocks, lease.partial_blocks = suffix_blocks, partial_blocks

    def _end_turn(self, lease: Lease, turn: TurnEnd, total_tokens: float | None) -> Sequence[Node]:
        path, lease.turn = lease.path, None
        node = self._keep_answer(lease, turn, total_tokens) if turn.answer_key is not None else None
        turn.keep(path, node)
        return path if node is None else [*path, node]

    def _keep_answer(self, lease: Lease, turn: TurnEnd, total_tokens: float | None) -> Node | None:
        size, last, suffix_blocks = self.tree.block_size, lease.path[-1], lease.suffix_blocks
        filled = (last.end // size + suffix_blocks) * size
        if total_tokens is not None:
            filled = max(filled, int(total_tokens))
        keys = [*(node.key for node in lease.path[1:]), turn.answer_key]
        lengths = [0] * (len(keys) - 1) + [max(0, filled + turn.closing_tokens - last.end)]
        node = self.tree.insert(keys, lengths, range(len(keys)))[-1]
        # The same answer may be there already.
        held = node.blocks - node.missing
        filled_blocks = max(held, min(suffix_blocks, node.blocks))
        self.used_blocks += filled_blocks - held - suffix_blocks
        node.missing = node.blocks - filled_blocks
        node.leases += 1
        lease.suffix_blocks = 0
        return node

    def cancel(self, lease: Lease) -> None:
        if not lease.open:
            return
        lease.open = False
        stamp = next(self.pool.clock)
        self.used_blocks -= lease.suffix_blocks + lease.partial_blocks
        path, lease.turn = lease.path, None
        for node in path:
            node.leases -= 1
            node.stamp = stamp
        self.pool.append(UseEntry(self, self._withdraw(path), stamp, 0))
        self.pool.count(self)
        lease.path = ()

    def _withdraw(self, path: Sequence[Node]) -> Node:
        """Drop what only a failed request would have filled, and return the last node that stays."""
        kept = len(path)
        while kept > 1 and self._take_back(path[kept - 1]):
            kept -= 1
        if kept == 1:
            self._take_back(path[0])
        return path[kept - 1]

    def holds(self, node: Node) -> bool:
        return not node.blocks or (bool(node.stamp) and not node.missing)

    def correct(self, lease: Lease, *, alone: bool = False) -> int | None:
        """Evict what was used before the missing blocks of a request that found less than predicted (`Pool.lose`)."""
        return self.pool.lose(lease.previous_stamp, self, alone=alone)

    def resize(self, prefix_tokens: int, ratio: float) -> None:
        """Set the prefix's length, and multiply that of every document by `ratio`.

        Nodes held completely stay so, others keep their held blocks.
        """
        size, root = self.tree.block_size, self.tree.root
        ends = {node: node.end for node in self.tree.walk()}
        held_ends = [
            (lease, ends[lease.path[lease.cached_documents]])
            for holder, lease in self.pool.in_flight
            if holder is self and lease.open
        ]
        for node, end in ends.items():
            start = 0 if node.parent is None else node.parent.end
            length = 0 if node.parent is None else end - ends[node.parent]
            if isinstance(node.key, AnswerKey):
                node.end = max(start, end)
            else:
                node.end = prefix_tokens if node is root else start + round(ratio * length)
            blocks, held = node.end // size - start // size, node.blocks - node.missing
            whole = not node.missing and node.stamp
            filling = node.provisional
            node.provisional = blocks if filling and filling == node.blocks else min(filling, blocks)
            node.missing = 0 if whole else max(0, blocks - held) if held else blocks
            node.blocks = blocks
            self.used_blocks += blocks - node.missing - held
        for lease, end in held_ends:
            moved = lease.path[lease.cached_documents].end // size - end // size
            lease.cached_tokens += moved * size if lease.cached_tokens else 0
        pool = self.pool
        pool.count(self)
        if pool.used_blocks > pool.capacity_blocks:
            pool.make_room(self)
        if (excess := pool.used_blocks - pool.capacity_blocks) > 0 and not root.leases:
            # A prefix that filled no block so far may have no log entry to evict it by.
            self._mark_missing(root, min(excess, root.blocks - root.missing))
            pool.count(self)

    def truncate(self, node: Node, kept_blocks: int) -> None:
        below = list(self.tree.walk(node))
        for each in reversed(below[1:]):
            self._mark_missing(each, each.blocks - each.missing)
        self._mark_missing(node, max(0, node.blocks - node.missing - kept_blocks))

    def mark_held(self, node: Node, held_blocks: int) -> None:
        found = held_blocks - node.blocks + node.missing
        if found > 0:
            self.used_blocks += found
            node.missing -= found

    def _mark_missing(self, node: Node, blocks: int) -> None:
        self.used_blocks -= blocks
        node.missing += blocks
        if node.missing == node.blocks and node.parent is not None and not node.children:
            self._remove(node)

    def _take_back(self, node: Node) -> bool:
        """Mark blocks missing that only failed requests would have filled. Return whether nothing is left."""
        if node.leases or node.children or (node.blocks and not node.provisional):
            return False
        self.used_blocks -= node.provisional
        node.missing, node.provisional = node.provisional, 0
        if node.missing < node.blocks:
            return False
        self._remove(node)
        return True

    def _remove(self, node: Node) -> None:
        self.tree.remove(node)

    def _evict(self, node: Node) -> None:
        self._remove(node)

    def _evict_root(self, root: Node) -> None:
        root.missing = root.blocks

    def evict(self, use: UseEntry, blocks: int) -> bool:
        node = use.skip_evicted()
        left = blocks - use.suffix_blocks
        if left < 0:
            use.suffix_blocks = -left
            self.used_blocks -= blocks
            return True
        self.used_blocks -= use.suffix_blocks
        use.suffix_blocks = 0
        stamp, evict = use.stamp, self._evict
        while node.stamp == stamp and not node.leases:
            held = node.blocks - node.missing
            if held > left:
                node.missing += left
                use.node = node
                self.used_blocks -= left
                return True
            self.used_blocks -= held
            left -= held
            parent = node.parent
            if parent is None:
                self._evict_root(node)
                break
            evict(node)
            node = parent
        return False
