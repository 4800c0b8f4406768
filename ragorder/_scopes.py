"""Scopes of an orderer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from sys import maxsize

from ragorder._scope import Scope, ScopeOwner
from ragorder.settings import Settings

__all__ = ["Scopes"]


class Scopes(OrderedDict[Hashable, Scope], ScopeOwner):
    """Scopes by name, least recently used first.

    At most `max_scopes`, with at most `max_nodes` nodes and the engine's capacity in blocks together: of all scopes the
    least recently used blocks are evicted first.
    """

    def __init__(
        self,
        settings: Settings,
        defer: Callable[[Callable[[], None]], None],
        report: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self.clock = count(1)
        self.defer = defer
        self.report = report
        self._max_scopes = settings.max_scopes
        self._max_nodes = settings.max_nodes
        bounded = settings.capacity_tokens is not None and settings.residency != "none"
        self._max_blocks = (settings.capacity_tokens or 0) // settings.block_size if bounded else maxsize
        self._nodes = self._blocks = self._evicted_blocks = 0
        # (stamp, number, scope): nothing evictable in the scope is older than the stamp.
        self._by_age: list[tuple[int, int, Scope]] = []
        self._numbers = count()

    @property
    def evicted_blocks(self) -> int:
        return self._evicted_blocks + sum(scope.mirror.evicted_blocks for scope in dict.values(self))

    def add(self, scope: Scope) -> Scope:
        """Replaces a damaged scope of this name, or the least recently used one beyond `max_scopes`."""
        if (former := self.get(scope.name)) is not None:
            self.forget(former)
        if len(self) >= self._max_scopes and (first := self._first()) is not None:
            self.forget(first)
        self[scope.name] = scope
        if scope.shares_room:
            heappush(self._by_age, (next(self.clock), next(self._numbers), scope))
        return scope

    def forget(self, scope: Scope) -> None:
        try:
            del self[scope.name]
        except Exception:
            # The hash of the name changed, or its equality raises: it cannot be removed alone.
            self.clear()
            return
        self._evicted_blocks += scope.mirror.evicted_blocks
        self._nodes -= scope.nodes
        self._blocks -= scope.blocks
        if not scope.whole:
            # An interrupt may have come between two counts.
            self._nodes = sum(each.nodes for each in dict.values(self))
            self._blocks = sum(each.blocks for each in dict.values(self))
        scope.close()
        if len(self._by_age) > 2 * len(self) + 64:
            self._by_age = [entry for entry in self._by_age if not entry[2].closed]
            heapify(self._by_age)

    def clear(self) -> None:
        self._evicted_blocks = self.evicted_blocks
        for scope in dict.values(self):
            scope.close()
        super().clear()
        self._by_age.clear()
        self._nodes = self._blocks = 0

    def changed(self, scope: Scope) -> None:
        self._count(scope)
        if self._nodes > self._max_nodes or self._blocks > self._max_blocks:
            self._make_room(scope)

    def _first(self, current: Scope | None = None) -> Scope | None:
        try:
            return next((scope for scope in self.values() if scope is not current), None)
        except Exception:
            # As in `forget`.
            self.clear()
            return None

    def _count(self, scope: Scope) -> None:
        if scope.closed:
            return
        nodes, scope.nodes = scope.nodes, scope.tree.size
        self._nodes += scope.nodes - nodes
        if scope.shares_room:
            blocks, scope.blocks = scope.blocks, scope.mirror.used_blocks
            self._blocks += scope.blocks - blocks

    def _make_room(self, current: Scope) -> None:
        """`current` is being changed, and so not whole."""
        while self._nodes > self._max_nodes or self._blocks > self._max_blocks:
            scope = self._oldest(current)
            if scope is None:
                # The rest is in flight, or followed by events, which report evictions themselves.
                scope = self._first(current)
                if scope is None:
                    return
                if not (scope.whole and scope.shares_room and scope.mirror.finish_oldest()):
                    self.forget(scope)
                continue
            excess = self._blocks - self._max_blocks
            scope.whole = False
            scope.mirror.evict(excess if excess > 0 else maxsize)
            self._count(scope)
            scope.whole = scope is not current
            if not (scope.tree.size or scope.blocks or scope.tree.root.leases or scope is current):
                # Its popularity counts take room as well.
                self.forget(scope)

    def _oldest(self, current: Scope) -> Scope | None:
        by_age = self._by_age
        busy = []
        found = None
        while by_age and found is None:
            stamp, number, scope = by_age[0]
            oldest = None if scope.closed else scope.mirror.oldest
            if oldest is None:
                heappop(by_age)
                if not scope.closed:
                    busy.append(scope)
            elif not scope.whole and scope is not current:
                self.forget(scope)
            elif oldest > stamp:
                heapreplace(by_age, (oldest, number, scope))
            else:
                found = scope
        for scope in busy:
            # Nothing in it is evictable: what will be is newer than now.
            heappush(by_age, (next(self.clock), next(self._numbers), scope))
        return found
