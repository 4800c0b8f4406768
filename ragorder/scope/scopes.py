"""Scopes of an orderer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from ragorder.scope.scope import Scope, ScopeOwner
from ragorder.scope.tiers import EngineTiers
from ragorder.settings import Settings
from ragorder.trie.histories import KnownSegments
from ragorder.trie.residency import Pool

if TYPE_CHECKING:
    from ragorder.trie.residency.blocks import EngineBlocks

MAX_NODES = 100_000
MAX_SCOPES = 1024


class Scopes(OrderedDict[Hashable, Scope], ScopeOwner):
    """Scopes by name on one `pool`, least recently used first, at most `MAX_SCOPES`."""

    def __init__(
        self,
        settings: Settings,
        tiers: EngineTiers,
        defer: Callable[[Callable[[], None]], None],
        blocks: EngineBlocks | None = None,
    ) -> None:
        super().__init__()
        self.tiers = tiers
        self.defer = defer
        self.blocks = blocks
        self.segments = KnownSegments()
        self._settings = settings
        self._max_nodes = MAX_NODES
        self.pool = self.make_pool()

    def make_pool(self) -> Pool:
        settings = self._settings
        if settings.residency == "none":
            return Pool(None, settings.block_size, self._max_nodes)
        if self.blocks is None:
            return self.tiers.make_pool(self._max_nodes)
        from ragorder.trie.residency.followed import FollowedPool

        options = settings.held_tokens, settings.block_size, self._max_nodes, settings.partial_blocks_first
        return FollowedPool(*options, blocks=self.blocks)

    def add(self, scope: Scope) -> Scope:
        if (former := self.get(scope.name)) is not None:
            self.drop(former)
        if len(self) >= MAX_SCOPES and (first := self._first()) is not None:
            self.drop(first)
        self[scope.name] = scope
        return scope

    def drop(self, scope: Scope) -> None:
        try:
            del self[scope.name]
        except Exception:
            # The hash of the name changed, or its equality raises, so it cannot be removed alone.
            self.clear()
            return
        scope.close()

    def clear(self) -> None:
        for scope in dict.values(self):
            scope.close()
        super().clear()

    def stop_following(self) -> None:
        self.clear()
        self.blocks = None
        evicted_blocks, self.pool = self.pool.evicted_blocks, self.make_pool()
        self.pool.evicted_blocks = evicted_blocks

    def changed(self) -> None:
        """Drop scopes whose documents are all evicted: their forecasts take memory."""
        if emptied := self.pool.emptied:
            self.pool.emptied = []
            for scope in [scope for scope in dict.values(self) if scope.mirror in emptied]:
                self.drop(scope)

    def _first(self) -> Scope | None:
        try:
            return next(iter(self.values()), None)
        except Exception:
            # As in `drop`.
            self.clear()
            return None
