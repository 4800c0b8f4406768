"""Unlimited residency: what was served stays cached (RAGCache++ section 3.4)."""

from __future__ import annotations

from collections.abc import Iterator

from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.tree import KnowledgeTree

__all__ = ["NoResidency"]


class NoResidency(LRUResidency):
    """An engine that never evicts; `max_nodes` bounds the tree, least recently used sequences first."""

    def __init__(self, tree: KnowledgeTree, max_nodes: int = 100_000, clock: Iterator[int] | None = None) -> None:
        super().__init__(tree, None, max_nodes, clock=clock)
