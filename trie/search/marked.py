"""Prefix search in a cache that resumes at marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ragorder.trie.marked_tree import MarkedTree
from ragorder.trie.search.base import Permits, PrefixSearch, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["MarkedPathSearch"]


class MarkedPathSearch(PrefixSearch):
    """Depth-first search of all paths within the request's documents, over at most `budget` nodes of a `MarkedTree`.

    The path that resumes latest wins, and ends at its mark: unmarked nodes are only walked through. Among equals comes
    the one that later requests gain most by, as requests in flight mark it or a junction will be there, then the most
    recently used.
    """

    def __init__(self, budget: int = 1024) -> None:
        self.budget = budget

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        assert isinstance(tree, MarkedTree)
        best = tree.root
        resumable = tree.resumable
        held = resumable(best)
        merit = (held, 0, 0)
        stack = [(child, held) for child in _children(best, ranks)]
        stack.reverse()
        budget = self.budget
        while stack and budget:
            budget -= 1
            node, held = stack.pop()
            if permits is not None and not permits(ranks_on_path(node, ranks)):
                continue
            own = resumable(node)
            held = max(held, own)
            if own or tree.joins(node):
                found = (held, node.end, node.stamp)
                if found > merit:
                    best, merit = node, found
            stack += [(child, held) for child in _children(node, ranks)]
        return best


def _children(node: Node, ranks: Mapping[Key, int]) -> Iterator[Node]:
    below = node.children
    if not below:
        return iter(())
    if len(below) <= len(ranks):
        return (child for key, child in below.items() if key in ranks)
    return filter(None, map(below.get, ranks))
