"""Searches for the cached prefix that a request extends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key, KnowledgeTree, Node

SEARCH_BUDGET = 1024
"""Nodes that one search of an orderer examines."""

Permits = Callable[[Sequence[int]], bool]
"""Return whether an order may begin with these ranks."""


class PrefixSearch(ABC):
    """Finds a cached path of the request's documents."""

    def __init__(self, budget: int = SEARCH_BUDGET) -> None:
        self.budget = budget

    @abstractmethod
    def find(self, tree: KnowledgeTree, ranks: Mapping[Key, int], permits: Permits | None = None) -> Node:
        """Return the last node of the path, or the root if none is cached. `ranks` are retrieval ranks, ascending."""


def ranks_on_path(node: Node, ranks: Mapping[Key, int]) -> list[int]:
    path = []
    while node.parent is not None:
        path.append(ranks[node.key])
        node = node.parent
    path.reverse()
    return path


searches: Registry[PrefixSearch] = Registry("search")


@searches.register("best", "the longest cached path in tokens")
class BestPathSearch(PrefixSearch):
    """Depth-first search of at most `budget` nodes; ties go to the last used. A partly cached node ends its path."""

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


@searches.register("greedy", "the best-ranked cached document at each step (RAGCache++)")
class GreedySearch(PrefixSearch):
    """At each node, takes the cached child with the best rank (Algorithm 1; the paper's code uses hash order).

    Under guards at most `budget` orders are checked.
    """

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


class Price(Protocol):
    """Seconds until a prompt is prefilled: T(cached, new) of RAGCache 5.1, and loads from host memory and disk."""

    def __call__(self, cached_tokens: int, new_tokens: float, host_tokens: int, disk_tokens: int) -> float: ...


class Rest(NamedTuple):
    """What a request computes and loads besides its cached path.

    `new_tokens`: tokens to compute, by cached tokens. `loads`: tokens to load from host memory and disk, by reused
    document off the path.
    """

    new_tokens: Callable[[int], float]
    loads: Mapping[Key, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PricedPaths:
    """Search for the cached path that saves most seconds; ties go to the longest, then the last used.

    `loads` returns a node's blocks to load from host memory and disk.
    """

    budget: int
    price: Price
    loads: Callable[[Node], tuple[int, int]]

    def improve(
        self, longest: Node, tree: KnowledgeTree, ranks: Mapping[Key, int], rest: Rest, permits: Permits | None = None
    ) -> Node:
        """Return the last node of the best path: `longest` if it is all on the device."""
        if self._on_device(longest):
            return longest
        price, loads, size = self.price, self.loads, tree.block_size
        best = tree.root
        # The prompt's beginning is loaded for every path.
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
            if any(self.loads(node)):
                return False
            node = node.parent
        return True


def _children(node: Node, ranks: Mapping[Key, int]) -> list[Node]:
    below = node.children
    return [below[key] for key in ranks if key in below] if below else []


SearchName = Literal["best", "greedy"] | str
"""Registered names, listed for type checkers."""
