"""Residency that mirrors the block pool of a serving engine (vLLM's automatic prefix caching)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from sys import maxsize

from ragorder.trie.residency.base import Lease
from ragorder.trie.tree import KnowledgeTree, Node

__all__ = ["LRUResidency"]

_MAX_IN_FLIGHT = 1024


class LRUResidency:
    """Least recently used first, a request's tail before its head, block by block, as vLLM frees them.

    `capacity_tokens` is what the engine's cache holds (None: unlimited); `max_nodes` bounds the tree's memory whatever
    the capacity. Blocks of requests in flight are not evicted, and shared blocks are counted once. A block that a
    request did not fill is of no use to others: with `partial_blocks_first` it is taken before any other (vLLM 0.32);
    else it waits its turn (earlier versions).

    The order of use is a log with one entry a served request (deepest node, stamp, suffix blocks), oldest first. A
    node that was used again since bears a newer stamp than the entry, and is passed over.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        capacity_tokens: int | None,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
    ) -> None:
        self.tree = tree
        self.capacity_blocks = maxsize if capacity_tokens is None else capacity_tokens // tree.block_size
        self.max_nodes = max_nodes
        self.partial_blocks_first = partial_blocks_first
        self.used_blocks = 0
        self.evicted_blocks = 0
        self._clock = 0
        self._log: deque[tuple[Node, int, int]] = deque()
        self._log_limit = 1024
        self._in_flight: deque[Lease] = deque()

    def lease(self, path: Sequence[Node], suffix_tokens: int) -> Lease:
        block_size = self.tree.block_size
        self._clock = stamp = self._clock + 1
        documents_end = path[-1].end
        documents_blocks = documents_end // block_size
        held_end = documents_blocks * block_size
        held = first_missing = previous_stamp = 0
        for node in path:
            if node.missing:
                break
            held += 1
            previous_stamp = 0 if node.leases else node.stamp
            node.leases += 1
            node.stamp = stamp
        new_blocks = 0
        if held < len(path):
            first_missing = path[held].missing
            held_end = (path[held].end // block_size - first_missing) * block_size
            for node in path[held:]:
                new_blocks += node.missing
                node.missing = 0
                node.leases += 1
                node.stamp = stamp
        suffix_blocks = (documents_end + suffix_tokens) // block_size - documents_blocks
        partial_blocks = 1 if (documents_end + suffix_tokens) % block_size else 0
        self.used_blocks += new_blocks + suffix_blocks + partial_blocks
        cached_documents = held - 1 if held else 0
        lease = Lease(
            path,
            stamp,
            suffix_blocks,
            partial_blocks,
            cached_documents,
            held_end,
            previous_stamp,
            held,
            first_missing,
        )
        in_flight = self._in_flight
        in_flight.append(lease)
        while not in_flight[0].open:
            in_flight.popleft()
        if len(in_flight) > _MAX_IN_FLIGHT:
            self._finish_oldest()
        if self.used_blocks > self.capacity_blocks or self.tree.size > self.max_nodes:
            self._make_room()
        return lease

    def release(self, lease: Lease, cached_tokens: int | None = None) -> None:
        if not lease.open:
            return
        if cached_tokens is not None and cached_tokens <= lease.cached_tokens - self.tree.block_size:
            # The engine evicts in order of use: what was used before the lost blocks is lost as well.
            while self._log and self._log[0][1] <= lease.previous_stamp:
                self._evict_oldest(maxsize)
        lease.open = False
        self._clock = stamp = self._clock + 1
        path = lease.path
        for node in path:
            node.leases -= 1
            node.stamp = stamp
        suffix_blocks = lease.suffix_blocks
        if self.partial_blocks_first:
            self.used_blocks -= lease.partial_blocks
        else:
            suffix_blocks += lease.partial_blocks
        self._append(path[-1], stamp, suffix_blocks)
        lease.path = ()

    def cancel(self, lease: Lease) -> None:
        if not lease.open:
            return
        lease.open = False
        self._clock = stamp = self._clock + 1
        self.used_blocks -= lease.suffix_blocks + lease.partial_blocks
        for node in lease.path:
            node.leases -= 1
        last = self._take_back(lease)
        above: Node | None = last
        while above is not None:
            above.stamp = stamp
            above = above.parent
        self._append(last, stamp, 0)
        lease.path = ()

    def _take_back(self, lease: Lease) -> Node:
        """Undo what only this lease filled, from the tail; the deepest node that stays."""
        tree, path = self.tree, lease.path
        for place in range(len(path) - 1, lease.filled_from - 1, -1):
            node = path[place]
            if node.leases or node.children or node.stamp != lease.stamp:
                return node
            node.missing = lease.first_missing if place == lease.filled_from else node.blocks
            self.used_blocks -= node.missing
            if node.missing < node.blocks:
                return node
            tree.remove(node)
        return path[max(0, lease.filled_from - 1)]

    def _make_room(self) -> None:
        while (excess := self.used_blocks - self.capacity_blocks) > 0 or self.tree.size > self.max_nodes:
            if self._log:
                self._evict_oldest(excess if excess > 0 else maxsize)
            elif not self._finish_oldest():
                return

    def _evict_oldest(self, blocks: int) -> None:
        """Give up at most so many blocks of the least recently used request, from its tail."""
        node, stamp, suffix_blocks = self._log.popleft()
        if suffix_blocks > blocks:
            self._log.appendleft((node, stamp, suffix_blocks - blocks))
            self._free(blocks)
            return
        tree = self.tree
        left = blocks - suffix_blocks
        while node.stamp == stamp and not node.leases:
            held = node.blocks - node.missing
            if held > left or not left:
                node.missing += left
                left = 0
                self._log.appendleft((node, stamp, 0))
                break
            left -= held
            node.missing += held
            if node.parent is None:
                break
            tree.remove(node)
            node = node.parent
        self._free(blocks - left)

    def _free(self, blocks: int) -> None:
        self.used_blocks -= blocks
        self.evicted_blocks += blocks

    def _finish_oldest(self) -> bool:
        while self._in_flight:
            lease = self._in_flight.popleft()
            if lease.open:
                self.release(lease)
                return True
        return False

    def _append(self, leaf: Node, stamp: int, suffix_blocks: int) -> None:
        log = self._log
        log.append((leaf, stamp, suffix_blocks))
        if len(log) > self._log_limit:
            bounded = self.capacity_blocks < maxsize
            self._log = deque(e for e in log if e[0].stamp == e[1] or (bounded and e[2]))
            self._log_limit = 2 * len(self._log) + 1024
