"""Best-path prefix search with look-ahead."""

from __future__ import annotations

from collections.abc import Mapping

from ragorder.trie.search.base import Permits, PrefixSearch, ranks_on_path, searches
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["BestPathSearch"]


@searches.register("best", "the longest cached path in tokens")
class BestPathSearch(PrefixSearch):
    """Depth-first search of all paths within the request's documents, over at most `budget` nodes.

    The longest cached prefix in tokens wins, among equals the most recently used. A partly held node counts with that
    part and ends its path.
    """

    def __init__(self, budget: int = 1024) -> None:
        self.budget = budget

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        best = tree.root
        if best.missing or not best.children:
            return best
        best_end = best.end
        stack = list(filter(None, map(best.children.get, ranks)))
        stack.reverse()
        width = len(ranks)
        budget = self.budget
        while stack and budget:
            budget -= 1
            node = stack.pop()
            if permits is not None and not permits(ranks_on_path(node, ranks)):
                continue
            end = tree.cached_tokens(node) if node.missing else node.end
            if end >= best_end and (end > best_end or node.stamp > best.stamp):
                best = node
                best_end = end
            if node.missing:
                continue
            below = node.children
            if below:
                if len(below) <= width:
                    stack += [child for key, child in below.items() if key in ranks]
                else:
                    stack += filter(None, map(below.get, ranks))
        return best
