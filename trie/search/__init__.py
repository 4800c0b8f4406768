"""Prefix searches: the cached path that a request should extend."""

from ragorder.trie.search.base import PrefixSearch, ranks_on_path
from ragorder.trie.search.best import BestPathSearch
from ragorder.trie.search.greedy import GreedySearch

__all__ = ["BestPathSearch", "GreedySearch", "PrefixSearch", "ranks_on_path"]
