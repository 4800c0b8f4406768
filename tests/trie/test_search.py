"""Prefix searches: which cached path a request extends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import counted_lines

from ragorder.trie.residency import LRUResidency, Pool
from ragorder.trie.search import (
    BestPathSearch,
    GreedySearch,
    Permits,
    PrefixSearch,
    Price,
    PricedPaths,
    Rest,
    ranks_on_path,
)
from ragorder.trie.tree import Key, KnowledgeTree, Node

BLOCK = 16
shared = settings(suppress_health_check=[HealthCheck.differing_executors])
"""For properties that several classes inherit: each runs them on another implementation."""

KEYS = "abcdefg"
REQUESTS = st.lists(st.sampled_from(KEYS), unique=True, max_size=6)


@st.composite
def trees(draw: st.DrawFn) -> KnowledgeTree:
    """What is left of some served requests in a cache of some size; zero to five requests are still in flight."""
    lengths = {key: draw(st.integers(0, 60)) for key in KEYS}
    tree = KnowledgeTree(BLOCK, draw(st.integers(0, 40)))
    blocks = draw(st.none() | st.integers(1, 60))
    residency = LRUResidency(tree, Pool(None if blocks is None else blocks * BLOCK, BLOCK))
    for number, documents in enumerate(draw(st.lists(REQUESTS, max_size=25))):
        path = tree.insert(documents, [lengths[key] for key in documents], range(len(documents)))
        lease = residency.lease(path, suffix_tokens=20)
        if number >= 5 or draw(st.booleans()):
            residency.release(lease)
    return tree


def tree_of(*sequences: str, tokens: Mapping[str, int] | None = None, prefix_tokens: int = 16) -> KnowledgeTree:
    """A tree that holds these sequences whole, used in this order."""
    tree = KnowledgeTree(BLOCK, prefix_tokens)
    residency = LRUResidency(tree, Pool(None, BLOCK))
    for documents in sequences:
        lengths = [(tokens or {}).get(key, 32) for key in documents]
        residency.release(residency.lease(tree.insert(documents, lengths, range(len(documents))), 20))
    return tree


def ranks_of(documents: Sequence[str]) -> dict[Key, int]:
    return {key: rank for rank, key in enumerate(documents)}


def find(
    search: PrefixSearch, tree: KnowledgeTree, documents: Sequence[str], permits: Permits | None = None
) -> list[str]:
    """The documents of the path that is found."""
    ranks = ranks_of(documents)
    return [documents[rank] for rank in ranks_on_path(search.find(tree, ranks, permits), ranks)]


def near(limit: int) -> Permits:
    return lambda ranks: all(abs(place - rank) <= limit for place, rank in enumerate(ranks))


def all_paths(tree: KnowledgeTree, documents: Sequence[str], permits: Permits | None) -> list[Node]:
    """Brute force: the last node of every cached order of some of the documents."""
    found = [tree.root]
    for length in range(1, len(documents) + 1):
        for ranks in permutations(range(len(documents)), length):
            node: Node | None = tree.root
            for rank in ranks:
                node = (node.children or {}).get(documents[rank]) if node and not node.missing else None
            if node is not None and (permits is None or permits(ranks)):
                found.append(node)
    return found


def held_tokens(tree: KnowledgeTree, node: Node) -> int:
    return tree.cached_tokens(node) if node.missing else node.end


def algorithm_1(tree: KnowledgeTree, documents: Sequence[str]) -> list[str]:
    """RAGCache++ Algorithm 1, line by line, without the tail of line 12."""
    ordered: list[str] = []
    remaining = list(documents)
    node = tree.root
    while remaining:
        found = False
        for document in remaining:
            child = (node.children or {}).get(document)
            if child is not None:
                ordered.append(document)
                remaining.remove(document)
                node = child
                found = True
                break
        if not found:
            break
    return ordered


class SearchContract:
    """What every search does."""

    search: PrefixSearch

    @shared
    @given(trees(), REQUESTS)
    def test_a_search_is_deterministic_and_changes_nothing(self, tree: KnowledgeTree, documents: list[str]) -> None:
        def state() -> list[Any]:
            return [(node, node.missing, node.stamp, node.leases, list(node.children or {})) for node in tree.walk()]

        before, ranks = state(), ranks_of(documents)
        assert self.search.find(tree, ranks) is self.search.find(tree, ranks)
        assert (state(), ranks) == (before, ranks_of(documents))

    @shared
    @given(trees(), REQUESTS, st.integers(0, 3))
    def test_the_path_is_permitted(self, tree: KnowledgeTree, documents: list[str], limit: int) -> None:
        permits = near(limit)
        ranks = ranks_of(documents)
        assert permits(ranks_on_path(self.search.find(tree, ranks, permits), ranks))

    def test_goes_round_what_is_not_permitted(self) -> None:
        tree = tree_of("abc", "bac")
        assert find(self.search, tree, "abc", lambda ranks: ranks[0] != 0) == ["b", "a", "c"]

    def test_what_follows_a_part_that_is_not_held_whole_is_not_found(self) -> None:
        tree = tree_of("abcd", prefix_tokens=64)
        next(node for node in tree.walk() if node.key == "b").missing = 1
        assert find(self.search, tree, "abcd") == ["a", "b"]
        tree.root.missing = 1
        assert find(self.search, tree, "abcd") == []

    def test_one_deep_path(self) -> None:
        steps = []
        for count in (2_000, 10_000):
            documents = [f"d{number}" for number in range(count)]
            tree = KnowledgeTree(BLOCK)
            residency = LRUResidency(tree, Pool(None, BLOCK))
            residency.release(residency.lease(tree.insert(documents, [1] * count, range(count)), 20))
            with counted_lines() as lines:
                node = self.search.find(tree, ranks_of(documents[::-1]))
            assert node.end >= 1_000
            steps += lines
        assert steps[1] <= 5 * 1.5 * steps[0]


class TestGreedy(SearchContract):
    search = GreedySearch()

    @given(trees(), REQUESTS)
    def test_greedy_search_is_algorithm_1(self, tree: KnowledgeTree, documents: list[str]) -> None:
        expected = [] if tree.root.missing else algorithm_1(tree, documents)
        assert find(self.search, tree, documents) == expected

    @pytest.mark.parametrize("children", [2, 30])
    def test_rank_decides_among_few_children_and_among_many(self, children: int) -> None:
        tree = tree_of(*[chr(ord("z") - number) for number in range(26)][:children], "c", "b")
        assert find(self.search, tree, "bca") == ["b"]


class TestBest(SearchContract):
    search = BestPathSearch()

    @pytest.mark.parametrize("permits", [None, *map(near, range(4))], ids=["any", *range(4)])
    @given(trees(), REQUESTS)
    def test_saves_as_many_tokens_as_any_permitted_path_and_takes_the_latest_of_equal_ones(
        self, permits: Permits | None, tree: KnowledgeTree, documents: list[str]
    ) -> None:
        node = self.search.find(tree, ranks_of(documents), permits)
        paths = [tree.root] if tree.root.missing else all_paths(tree, documents, permits)
        best = max(held_tokens(tree, path) for path in paths)
        assert held_tokens(tree, node) == best
        if permits is None:
            assert tree.cached_tokens(node) == max(tree.cached_tokens(path) for path in paths)
            assert node.stamp == max(path.stamp for path in paths if held_tokens(tree, path) == best)

    @pytest.mark.parametrize("budget", [1, 2, 7, 50])
    def test_looks_at_no_more_nodes_than_its_budget(self, budget: int) -> None:
        tree = tree_of(*["".join(order) for order in permutations("abcde")])
        looked_at: list[tuple[int, ...]] = []

        def permits(ranks: Sequence[int]) -> bool:
            looked_at.append(tuple(ranks))
            return True

        node = BestPathSearch(budget).find(tree, ranks_of("abcdex"), permits)
        assert len(looked_at) == len(set(looked_at)) == budget
        assert tuple(ranks_on_path(node, ranks_of("abcdex"))) in looked_at

    def test_a_budget_of_one_looks_at_the_best_ranked_document(self) -> None:
        assert find(BestPathSearch(1), tree_of("abc", "cab"), "cab") == ["c"]

    @given(trees(), REQUESTS, st.integers(1, 10))
    def test_a_smaller_budget_never_saves_more(self, tree: KnowledgeTree, documents: list[str], budget: int) -> None:
        ranks = ranks_of(documents)
        saved = tree.cached_tokens(BestPathSearch(budget).find(tree, ranks))
        assert saved <= tree.cached_tokens(BestPathSearch(budget + 1).find(tree, ranks))
        assert saved <= tree.cached_tokens(self.search.find(tree, ranks))


def priced(price: Price, loads: Callable[[Node], tuple[int, int]], budget: int = 1024) -> PricedPaths:
    return PricedPaths(budget, price, loads)


def improved(paths: PricedPaths, tree: KnowledgeTree, documents: Sequence[str], permits: Permits | None = None) -> Node:
    """What the search of a priced scope finds."""
    ranks = ranks_of(documents)
    prompt_tokens = tree.root.end + 32 * len(documents)
    longest = BestPathSearch().find(tree, ranks, permits)
    return paths.improve(longest, tree, ranks, Rest(prompt_tokens.__sub__), permits)


class TestPricedPaths:
    """Seconds instead of tokens: RAGCache's T(cached, new), 1 s a computed token here, and loads."""

    @staticmethod
    def price(host_s: float, disk_s: float) -> Price:
        return lambda cached, new, host, disk: new + host * host_s + disk * disk_s

    @staticmethod
    def loads(node: Node) -> tuple[int, int]:
        """Of documents with two blocks each: b is on the disk, d in host memory."""
        return {"b": (0, 2), "d": (2, 0)}.get(str(node.key), (0, 0))

    def test_the_budget_bounds_it(self) -> None:
        tree = tree_of("ba", "d")
        assert improved(priced(self.price(0, 0), self.loads, budget=1), tree, "bad").key == "b"

    @shared
    @given(trees(), REQUESTS)
    def test_on_the_device_alone_any_price_decides_as_tokens_do(
        self, tree: KnowledgeTree, documents: list[str]
    ) -> None:
        nonsense = priced(lambda cached, new, host, disk: float(cached), lambda node: (0, 0))
        assert improved(nonsense, tree, documents) is BestPathSearch().find(tree, ranks_of(documents))

    @shared
    @given(trees(), REQUESTS, st.data())
    def test_no_path_saves_more(self, tree: KnowledgeTree, documents: list[str], data: st.DataObject) -> None:
        places = {key: data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) for key in KEYS}
        price = self.price(data.draw(st.floats(0, 3)), data.draw(st.floats(0, 3)))

        def seconds(node: Node) -> float:
            path = [documents[rank] for rank in ranks_on_path(node, ranks_of(documents))]
            host, disk = (BLOCK * sum(places[key][tier] for key in path) for tier in (0, 1))
            return price(0, -held_tokens(tree, node), host, disk)

        def loads(node: Node) -> tuple[int, int]:
            return places[str(node.key)]

        found = improved(priced(price, loads), tree, documents)
        assert seconds(found) == pytest.approx(min(map(seconds, all_paths(tree, documents, None))))
