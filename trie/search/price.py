"""Cached paths compared in seconds, for engines with several tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ragorder.trie.search.base import Permits, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["Price", "PricedPaths", "Rest"]


class Price(Protocol):
    """Seconds until a prompt is prefilled: RAGCache's T(cached, new) (section 5.1) and the loads before it."""

    def __call__(self, cached_tokens: int, new_tokens: float, host_tokens: int, disk_tokens: int) -> float:
        """Of the cached tokens some are loaded from host memory and some from disk."""


class Rest(NamedTuple):
    """What a request needs beside its cached path.

    `new_tokens`: those computed behind so many cached ones. `loads`: of documents taken over if they are not on
    the path, the tokens loaded from host memory and from disk.
    """

    new_tokens: Callable[[int], float]
    loads: Mapping[Key, tuple[int, int]] = MappingProxyType({})


class PricedPaths:
    """The cached path that saves most seconds, among equals the longest, then the most recently used.

    `loads`: the blocks of a node that the engine loads from host memory and from disk. At most `budget` nodes are
    examined.
    """

    def __init__(self, budget: int, price: Price, loads: Callable[[Node], tuple[int, int]]) -> None:
        self.budget = budget
        self._price = price
        self._loads = loads

    def improve(
        self,
        longest: Node,
        tree: KnowledgeTree,
        ranks: Mapping[Key, int],
        rest: Rest,
        permits: Permits | None = None,
    ) -> Node:
        """The last node of the path. If the device has the whole `longest` one, no other saves more. `ranks` and
        `permits` are those of a search."""
        if self._on_device(longest):
            return longest
        price, loads, size = self._price, self._loads, tree.block_size
        best = tree.root
        # The prompt's beginning is loaded whichever path follows.
        host, disk = map(sum, zip((0, 0), *rest.loads.values(), strict=True))
        merit = (-price(best.end, rest.new_tokens(best.end), host, disk), best.end, best.stamp)
        stack = [(child, host, disk) for child in _children(best, ranks)]
        stack.reverse()
        budget = self.budget
        while stack and budget:
            budget -= 1
            node, host, disk = stack.pop()
            if permits is not None and not permits(ranks_on_path(node, ranks)):
                continue
            end = tree.cached_tokens(node) if node.missing else node.end
            from_host, from_disk = loads(node)
            spared = rest.loads.get(node.key, (0, 0))
            host += from_host * size - spared[0]
            disk += from_disk * size - spared[1]
            found = (-price(end, rest.new_tokens(end), host, disk), end, node.stamp)
            if found > merit:
                best, merit = node, found
            if not node.missing:
                stack += [(child, host, disk) for child in _children(node, ranks)]
        return best

    def _on_device(self, node: Node) -> bool:
        while node.parent is not None:
            if any(self._loads(node)):
                return False
            node = node.parent
        return True


def _children(node: Node, ranks: Mapping[Key, int]) -> list[Node]:
    below = node.children
    return [below[key] for key in ranks if key in below] if below else []
