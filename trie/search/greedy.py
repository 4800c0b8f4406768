"""Greedy prefix search: RAGCache++ Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping

from ragorder.trie.search.base import Permits, PrefixSearch, ranks_on_path, searches
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["GreedySearch"]


@searches.register("greedy", "the best-ranked cached document at each step (RAGCache++)")
class GreedySearch(PrefixSearch):
    """At each node takes the cached child with the best rank; under guards at most `budget` orders are checked. The
    paper's code iterates over a `set`, in hash order; here it is retrieval order, as Algorithm 1 is written."""

    def __init__(self, budget: int = 1024) -> None:
        self.budget = budget

    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        node = tree.root
        budget = self.budget
        while node.children and not node.missing:
            children = node.children
            if len(children) < len(ranks):
                candidates = sorted((key for key in children if key in ranks), key=ranks.__getitem__)
            else:
                candidates = [key for key in ranks if key in children]
            for key in candidates:
                child = children[key]
                if permits is not None:
                    if not budget:
                        return node
                    budget -= 1
                    if not permits(ranks_on_path(child, ranks)):
                        continue
                node = child
                break
            else:
                break
        return node
