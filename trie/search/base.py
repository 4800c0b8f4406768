"""Interface of a prefix search, and the registry of searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["Permits", "PrefixSearch", "ranks_on_path", "searches"]

Permits = Callable[[Sequence[int]], bool]
"""Whether an order may begin with these ranks."""


class PrefixSearch(Protocol):
    """Finds a cached path of the request's documents, within a `budget` of nodes."""

    def __init__(self, budget: int) -> None: ...

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        """The last node of the path; the root if no document is cached. `ranks`: retrieval rank by document key, in
        rank order; `permits` restricts the allowed orders."""


def ranks_on_path(node: Node, ranks: Mapping[Key, int]) -> list[int]:
    path = []
    while node.parent is not None:
        path.append(ranks[node.key])
        node = node.parent
    path.reverse()
    return path


searches: Registry[PrefixSearch] = Registry("search")
