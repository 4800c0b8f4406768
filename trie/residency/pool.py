"""Mirror of an engine's block pool, shared by all scopes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from sys import maxsize
from typing import Protocol, TypeVar, TypeVarTuple

from ragorder.trie.residency.base import Lease
from ragorder.trie.tree import KnowledgeTree, Node

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_MAX_IN_FLIGHT = 1024


class Holder(Protocol):
    """A residency in a pool: the blocks of one scope.

    `counted_nodes`, `counted_blocks`: its shares of the totals. `whole` is False during a change, and after an error or
    interrupt in one. `closed`: its scope is dropped.
    """

    tree: KnowledgeTree
    used_blocks: int
    counted_nodes: int
    counted_blocks: int
    whole: bool
    closed: bool

    def evict(self, use: UseEntry, blocks: int) -> bool:
        """Evict at most `blocks` last used by `use`. Return False if none are left."""

    def release(self, lease: Lease) -> None: ...

    def cancel(self, lease: Lease) -> None: ...


@dataclass(slots=True, eq=False)
class UseEntry:
    """A served request in the log: its deepest node, and its blocks after that.

    Without `holder` the blocks belong to other clients or dropped scopes.
    """

    holder: Holder | None
    node: Node
    stamp: int
    suffix_blocks: int

    def skip_evicted(self) -> Node:
        node = self.node
        while not node.stamp and node.parent is not None:
            node = self.node = node.parent
        return node

    @property
    def live(self) -> bool:
        if self.holder is None:
            return self.suffix_blocks > 0
        return not self.holder.closed and (self.suffix_blocks > 0 or self.skip_evicted().stamp == self.stamp)

    @property
    def blocks(self) -> int:
        """Blocks that nothing has used since."""
        blocks = self.suffix_blocks
        node: Node | None = self.skip_evicted()
        while node is not None and node.stamp == self.stamp and not node.leases:
            blocks += node.blocks - node.missing
            node = node.parent
        return blocks


class Pool:
    """Evicts block by block in order of use, a request's tail before its head, as vLLM does.

    `max_nodes` bounds all trees together. Requests in flight keep their blocks. With `partial_blocks_first` (vLLM 0.32)
    partly filled blocks are evicted first. Entries of the `log` older than their node's stamp are skipped.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        block_size: int,
        max_nodes: int = 1_000_000,
        partial_blocks_first: bool = True,
    ) -> None:
        self.unlimited = capacity_tokens is None
        self.capacity_blocks = maxsize if capacity_tokens is None else capacity_tokens // block_size
        self.max_nodes = max_nodes
        self.partial_blocks_first = partial_blocks_first
        self.clock = count(1)
        self.used_blocks = self.evicted_blocks = self.nodes = 0
        self.log: deque[UseEntry] = deque()
        self.in_flight: deque[tuple[Holder, Lease]] = deque()
        self.holders: dict[Holder, None] = {}
        # Holders that other requests have emptied, for their owner to drop.
        self.emptied: list[Holder] = []
        # From the engine's reports: losses applied here, and the capacity passed on to other mirrors.
        self.losses: int | None = None
        self.passed_on_blocks = self.capacity_blocks
        self._others_blocks = 0
        self._log_limit = 1024

    def copy(self, holder: Holder, copy: Holder, copies: Mapping[Node, Node]) -> Pool:
        pool = Pool(None, 1, self.max_nodes, self.partial_blocks_first)
        pool.clock = self.clock
        for use in self.log:
            if use.holder is not holder:
                if use.live:
                    pool._add_others(use.stamp, use.blocks)
                continue
            # A node outside the tree has no copy; only its request's suffix is held.
            node = copies.get(use.skip_evicted(), copy.tree.root)
            pool.log.append(UseEntry(copy, node, use.stamp, use.suffix_blocks))
        pool.in_flight.extend(
            (copy, lease.copy(copies)) for each, lease in self.in_flight if each is holder and lease.open
        )
        pool.unlimited, pool.evicted_blocks = self.unlimited, self.evicted_blocks
        if not self.unlimited:
            others_in_flight = self.used_blocks - holder.counted_blocks - pool.used_blocks
            pool.capacity_blocks = self.capacity_blocks - others_in_flight
        pool.count(copy)
        return pool

    @property
    def held_since(self) -> int:
        if not self.evicted_blocks or not self.log:
            return 0
        # The log has the ends of requests; other requests began before these.
        return self.log[0].stamp - 2 * len(self.in_flight)

    def begin(self, holder: Holder, lease: Lease) -> None:
        self.count(holder)
        in_flight = self.in_flight
        in_flight.append((holder, lease))
        while not in_flight[0][1].open:
            in_flight.popleft()
        if len(in_flight) > _MAX_IN_FLIGHT:
            self.finish_oldest(holder)
        if self.used_blocks > self.capacity_blocks or self.nodes > self.max_nodes:
            self.make_room(holder, lease)

    def append(self, use: UseEntry) -> None:
        log = self.log
        log.append(use)
        if len(log) > self._log_limit:
            self.log = deque(use for use in log if use.live)
            self._log_limit = 2 * len(self.log) + 1024

    def count(self, holder: Holder) -> None:
        if holder.closed:
            return
        blocks, nodes = holder.used_blocks, holder.tree.size
        if not holder.counted_blocks:
            self.holders[holder] = None
        self.used_blocks += blocks - holder.counted_blocks
        self.nodes += nodes - holder.counted_nodes
        holder.counted_blocks, holder.counted_nodes = blocks, nodes

    def make_room(self, current: Holder, lease: Lease | None = None) -> None:
        while (excess := self.used_blocks - self.capacity_blocks) > 0 or self.nodes > self.max_nodes:
            if self.log:
                self._evict_oldest(excess if excess > 0 else maxsize, current)
            elif not self._overflow(current):
                return

    def finish_oldest(self, current: Holder) -> bool:
        while self.in_flight:
            holder, lease = self.in_flight[0]
            pinned = lease.open and not holder.closed
            if pinned:
                self.change(holder, current, holder.release, lease)
            # Removed last: otherwise an interrupt would leave it pinned for ever.
            self.in_flight.popleft()
            if pinned:
                return True
        return False

    def change(
        self, holder: Holder, current: Holder, work: Callable[[*Arguments], T], *arguments: *Arguments
    ) -> T | None:
        """Do work on a holder, or return None if it is closed. A damaged one is dropped first, unless `current`."""
        if not holder.whole and not holder.closed and holder is not current:
            self.detach(holder)
        if holder.closed:
            return None
        whole, holder.whole = holder.whole, False
        result = work(*arguments)
        self.count(holder)
        holder.whole = whole
        return result

    def lose(self, stamp: int, current: Holder, *, alone: bool = False) -> int:
        """Evict what was last used up to `stamp` (if `alone`, only `current`'s), and charge other clients.

        Returns the remaining blocks.
        """
        used_blocks = self.used_blocks
        if alone:
            for use in takewhile(lambda use: use.stamp <= stamp, self.log):
                if use.holder is current:
                    self._evict(use, maxsize, current)
                    use.holder = None
        else:
            while self.log and self.log[0].stamp <= stamp:
                self._evict_oldest(maxsize, current)
        kept_blocks = self.used_blocks
        self._charge_others(used_blocks - kept_blocks)
        return kept_blocks

    def shrink_to(self, blocks: int, current: Holder) -> None:
        used_blocks = self.used_blocks
        while self.log and self.used_blocks > blocks:
            self._evict_oldest(self.used_blocks - blocks, current)
        self._charge_others(used_blocks - self.used_blocks)

    def detach(self, holder: Holder) -> None:
        if holder.closed:
            return
        holder.closed = True
        self.holders.pop(holder, None)
        if not self.unlimited and holder.counted_blocks:
            self.log.appendleft(UseEntry(None, _NOWHERE, 0, holder.counted_blocks))
            self._others_blocks += holder.counted_blocks
        if holder.whole:
            self.nodes -= holder.counted_nodes
            self.used_blocks -= holder.counted_blocks if self.unlimited else 0
        else:
            # An interrupt may have separated two counts.
            self.nodes = sum(each.counted_nodes for each in self.holders)
            self.used_blocks = sum(each.counted_blocks for each in self.holders) + self._others_blocks

    def _charge_others(self, blocks: int) -> None:
        if blocks and not self.unlimited:
            self._add_others(next(self.clock), blocks)

    def _add_others(self, stamp: int, blocks: int) -> None:
        self.log.append(UseEntry(None, _NOWHERE, stamp, blocks))
        self._others_blocks += blocks
        self.used_blocks += blocks

    def _evict_oldest(self, blocks: int, current: Holder) -> None:
        use = self.log[0]
        if self._evict(use, blocks, current) and self.log and self.log[0] is use:
            self.log.popleft()

    def _evict(self, use: UseEntry, blocks: int, current: Holder) -> bool:
        holder = use.holder
        if holder is None:
            taken = min(blocks, use.suffix_blocks)
            use.suffix_blocks -= taken
            self._others_blocks -= taken
            self.used_blocks -= taken
            return not use.suffix_blocks
        used_blocks = self.used_blocks
        left: bool | None
        if holder is current:
            left = holder.evict(use, blocks)
            self.count(holder)
        else:
            left = self.change(holder, current, holder.evict, use, blocks)
            if holder.closed:
                return True
            self.check_emptied(holder)
        self.evicted_blocks += used_blocks - self.used_blocks
        return not left

    def check_emptied(self, holder: Holder) -> None:
        if not (holder.used_blocks or holder.tree.size or holder.tree.root.leases):
            self.emptied.append(holder)

    def _overflow(self, current: Holder) -> bool:
        return self.finish_oldest(current)


_NOWHERE = Node(None, None, 0, 0)
