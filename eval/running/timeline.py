"""Timeline of a cache during a run, sampled now and then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.sim import SimEngine

__all__ = ["Timeline"]

_POINTS = 60


@dataclass(slots=True)
class Timeline:
    """Samples taken when `request` was sent: tokens in the cache, tokens evicted so far, and nodes of the policy's tree
    (None without one)."""

    request: list[int] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)
    evicted_tokens: list[int] = field(default_factory=list)
    tree_nodes: list[int | None] = field(default_factory=list)
    _engine: SimEngine | None = None
    _every: int = 1

    @classmethod
    def of(cls, engine: Cache, requests: int) -> Self | None:
        """At most 60 samples; None for an engine whose block table cannot be read."""
        if not isinstance(engine, SimEngine):
            return None
        return cls(_engine=engine, _every=max(1, -(-requests // _POINTS)))

    def sent(self, row: int, tree_nodes: int | None) -> None:
        engine = self._engine
        if row % self._every or engine is None:
            return
        self.request.append(row)
        self.held_tokens.append(engine.cached_blocks * engine.block_size)
        self.evicted_tokens.append(engine.evicted_blocks * engine.block_size)
        self.tree_nodes.append(tree_nodes)

    def as_json(self) -> dict[str, list[int | None]]:
        return {name: getattr(self, name) for name in ("request", "held_tokens", "evicted_tokens", "tree_nodes")}
