"""Residency that mirrors an engine's block pool (vLLM's automatic prefix caching)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from sys import maxsize
from typing import Self

from ragorder.trie.residency.base import Lease, RequestedDocuments, TokenIds
from ragorder.trie.tree import KnowledgeTree, Node

__all__ = ["LRUResidency"]

_MAX_IN_FLIGHT = 1024
_MAX_TOKENS = 1 << 32


class UseEntry:
    """A served request in the log: its deepest node, and the blocks after it still held."""

    __slots__ = ("node", "stamp", "suffix_blocks")

    def __init__(self, node: Node, stamp: int, suffix_blocks: int) -> None:
        self.node = node
        self.stamp = stamp
        self.suffix_blocks = suffix_blocks

    def skip_evicted(self) -> Self:
        while not self.node.stamp and self.node.parent is not None:
            self.node = self.node.parent
        return self


class LRUResidency:
    """Least recently used first, a request's tail before its head, block by block, as vLLM frees them.

    `capacity_tokens` is the engine's (None: unlimited); `max_nodes` bounds the tree regardless. Blocks of requests in
    flight are not evicted. Partly filled blocks are evicted first with `partial_blocks_first` (vLLM 0.32), else in
    their turn.

    The order of use is a log with an entry for each served request, oldest first; entries with an older stamp than
    their node's are skipped. Mirrors of one engine share the `clock` of stamps.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        capacity_tokens: int | None,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
        clock: Iterator[int] | None = None,
    ) -> None:
        self.tree = tree
        self.capacity_blocks = maxsize if capacity_tokens is None else capacity_tokens // tree.block_size
        self.max_nodes = max_nodes
        self.partial_blocks_first = partial_blocks_first
        self.used_blocks = 0
        self.evicted_blocks = 0
        self._remove = self._evict = tree.remove
        self._clock = count(1) if clock is None else clock
        self._log: deque[UseEntry] = deque()
        self._log_limit = 1024
        self._in_flight: deque[Lease] = deque()

    def copy(self) -> LRUResidency:
        tree, copies = self.tree.copy()
        mirror = LRUResidency(tree, None, self.max_nodes, self.partial_blocks_first)
        mirror.capacity_blocks, mirror.used_blocks = self.capacity_blocks, self.used_blocks
        mirror._clock = self._clock
        # A node outside the tree has no copy: only its request's suffix is held.
        mirror._log = deque(
            UseEntry(copies.get(use.skip_evicted().node, tree.root), use.stamp, use.suffix_blocks) for use in self._log
        )
        mirror._in_flight = deque(lease.copy(copies) for lease in self._in_flight if lease.open)
        return mirror

    def refresh(self, requested: RequestedDocuments | None = None) -> None: ...

    def lease(self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = ()) -> Lease:
        block_size = self.tree.block_size
        stamp = next(self._clock)
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
        suffix_blocks = (documents_end + suffix_tokens) // block_size - documents_blocks
        partial_blocks = 1 if (documents_end + suffix_tokens) % block_size else 0
        self.used_blocks += new_blocks + suffix_blocks + partial_blocks
        lease = Lease(path, stamp, suffix_blocks, partial_blocks, held - 1 if held else 0, held_end, previous_stamp)
        in_flight = self._in_flight
        in_flight.append(lease)
        while not in_flight[0].open:
            in_flight.popleft()
        if len(in_flight) > _MAX_IN_FLIGHT:
            self.finish_oldest()
        if self.used_blocks > self.capacity_blocks or self.tree.size > self.max_nodes:
            self._make_room()
        return lease

    def release(
        self,
        lease: Lease,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        prompt_tokens: float | None = None,
    ) -> None:
        if not lease.open:
            return
        lease.open = False
        if total_tokens is not None:
            self._correct_suffix(lease, total_tokens)
            if self.used_blocks > self.capacity_blocks:
                self._make_room()
        stamp = next(self._clock)
        path = lease.path
        for node in path:
            node.leases -= 1
            node.provisional = 0
            node.stamp = stamp
        suffix_blocks = lease.suffix_blocks
        if self.partial_blocks_first:
            self.used_blocks -= lease.partial_blocks
        else:
            suffix_blocks += lease.partial_blocks
        if self.capacity_blocks == maxsize:
            self.used_blocks -= suffix_blocks
            suffix_blocks = 0
        self._append(path[-1], stamp, suffix_blocks)
        lease.path = ()

    def _correct_suffix(self, lease: Lease, total_tokens: float) -> None:
        block_size = self.tree.block_size
        kept_tokens = max(lease.path[-1].end, min(int(total_tokens), _MAX_TOKENS) - 1)
        suffix_blocks = kept_tokens // block_size - lease.path[-1].end // block_size
        partial_blocks = 1 if kept_tokens % block_size else 0
        self.used_blocks += suffix_blocks + partial_blocks - lease.suffix_blocks - lease.partial_blocks
        lease.suffix_blocks, lease.partial_blocks = suffix_blocks, partial_blocks

    def cancel(self, lease: Lease) -> None:
        if not lease.open:
            return
        lease.open = False
        stamp = next(self._clock)
        self.used_blocks -= lease.suffix_blocks + lease.partial_blocks
        path = lease.path
        for node in path:
            node.leases -= 1
            node.stamp = stamp
        kept = len(path)
        while kept > 1 and self._take_back(path[kept - 1]):
            kept -= 1
        if kept == 1:
            self._take_back(path[0])
        self._append(path[kept - 1], stamp, 0)
        lease.path = ()

    def holds(self, node: Node) -> bool:
        """True also for a node that a request in flight fills."""
        return not node.blocks or (bool(node.stamp) and not node.missing)

    def correct(self, lease: Lease) -> int | None:
        """The request found less than predicted, since others use the engine; returns the remaining blocks. Everything
        used before the missing blocks is gone, and others' blocks, as young as new ones, have its room."""
        used_blocks = self.used_blocks
        while self._log and self._log[0].stamp <= lease.previous_stamp:
            self._evict_oldest(maxsize)
        kept_blocks = self.used_blocks
        self._charge_others(used_blocks - kept_blocks)
        return kept_blocks

    def shrink_to(self, blocks: int) -> None:
        used_blocks = self.used_blocks
        while self._log and self.used_blocks > blocks:
            self._evict_oldest(self.used_blocks - blocks)
        self._charge_others(used_blocks - self.used_blocks)

    def _charge_others(self, blocks: int) -> None:
        if blocks and self.capacity_blocks != maxsize:
            self._log.append(UseEntry(self.tree.root, next(self._clock), blocks))
            self.used_blocks += blocks

    def resize(self, prefix_tokens: int, ratio: float) -> None:
        """The prefix has `prefix_tokens`, every document `ratio` times the assumed tokens. Whole nodes stay whole,
        others keep their held blocks."""
        size, root = self.tree.block_size, self.tree.root
        ends = {node: node.end for node in self.tree.walk()}
        held_ends = [(lease, ends[lease.path[lease.cached_documents]]) for lease in self._in_flight if lease.open]
        for node, end in ends.items():
            start = 0 if node.parent is None else node.parent.end
            length = 0 if node.parent is None else end - ends[node.parent]
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
        if self.used_blocks > self.capacity_blocks:
            self._make_room()
        if (excess := self.used_blocks - self.capacity_blocks) > 0 and not root.leases:
            # A prefix that had filled no block may have no log entry by which it could be evicted.
            self._mark_missing(root, min(excess, root.blocks - root.missing))

    def truncate(self, node: Node, kept_blocks: int) -> None:
        """The engine holds the first `kept_blocks` of an unused node, and nothing below it."""
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
        """Marks a node's last blocks. A leaf without held blocks leaves the tree."""
        self.used_blocks -= blocks
        node.missing += blocks
        if node.missing == node.blocks and node.parent is not None and not node.children:
            self._remove(node)
            node.stamp = 0

    def _take_back(self, node: Node) -> bool:
        """Mark missing what only failed requests would have filled; True if nothing is left."""
        if node.leases or node.children or (node.blocks and not node.provisional):
            return False
        self.used_blocks -= node.provisional
        node.missing, node.provisional = node.provisional, 0
        if node.missing < node.blocks:
            return False
        self._remove(node)
        return True

    def _make_room(self) -> None:
        while (excess := self.used_blocks - self.capacity_blocks) > 0 or self.tree.size > self.max_nodes:
            if self._log:
                self._evict_oldest(excess if excess > 0 else maxsize)
            elif not self._overflow():
                return

    @property
    def oldest(self) -> int | None:
        return self._log[0].stamp if self._log else None

    def evict(self, blocks: int) -> None:
        """At most `blocks` of the least recently used request."""
        self._evict_oldest(blocks)

    def _evict_oldest(self, blocks: int) -> None:
        use = self._log[0].skip_evicted()
        left = blocks - use.suffix_blocks
        if left < 0:
            use.suffix_blocks = -left
            left = 0
        else:
            use.suffix_blocks = 0
            node, stamp, evict = use.node, use.stamp, self._evict
            while node.stamp == stamp and not node.leases:
                held = node.blocks - node.missing
                if held > left:
                    node.missing += left
                    use.node = node
                    left = 0
                    break
                left -= held
                parent = node.parent
                if parent is None:
                    node.missing = node.blocks
                    self._log.popleft()
                    break
                evict(node)
                node = parent
            else:
                self._log.popleft()
        self.used_blocks -= blocks - left
        self.evicted_blocks += blocks - left

    def _overflow(self) -> bool:
        """Requests in flight alone exceed the capacity; True if that could be changed."""
        return self.finish_oldest()

    def finish_oldest(self) -> bool:
        """Count the oldest request in flight as served; False without one."""
        while self._in_flight:
            lease = self._in_flight.popleft()
            if lease.open:
                self.release(lease)
                return True
        return False

    def _append(self, leaf: Node, stamp: int, suffix_blocks: int) -> None:
        log = self._log
        log.append(UseEntry(leaf, stamp, suffix_blocks))
        if len(log) > self._log_limit:
            self._log = deque(use for use in log if use.suffix_blocks or use.skip_evicted().node.stamp == use.stamp)
            self._log_limit = 2 * len(self._log) + 1024
