"""Prefix searches: the cached path that a request should extend."""

from typing import Literal

from ragorder.trie.search.base import PrefixSearch, ranks_on_path, searches
from ragorder.trie.search.best import BestPathSearch
from ragorder.trie.search.greedy import GreedySearch
from ragorder.trie.search.price import Price, PricedPaths, Rest

__all__ = [
    "BestPathSearch",
    "GreedySearch",
    "PrefixSearch",
    "Price",
    "PricedPaths",
    "Rest",
    "SearchName",
    "ranks_on_path",
    "searches",
]

SearchName = Literal["best", "greedy"] | str
"""The registered names, of which type checkers see these."""

searches.load(__name__, __path__)
