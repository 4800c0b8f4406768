"""A plan of a batch: a permutation of everything, never worse than what was given, cheap to make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, combinations_with_replacement
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import set_bounds
from support.rings import grid, length
from support.waiting import counted_lines

from ragorder.trie.plan import plan

KEYS = "abcdefgh"
TOKENS = st.fixed_dictionaries({key: st.integers(0, 600) for key in KEYS})
BATCHES = st.lists(st.permutations(KEYS).flatmap(lambda keys: st.integers(0, 8).map(lambda n: keys[:n])), max_size=12)


def trie_tokens(orders: Iterable[Sequence[str]], tokens: dict[str, int]) -> int:
    """Tokens of the trie of these orders: what an unlimited prefix cache prefills."""
    prefixes = {tuple(order[: n + 1]) for order in orders for n in range(len(order))}
    return sum(tokens[prefix[-1]] for prefix in prefixes)


def prefilled_tokens(orders: Iterable[Sequence[str]], tokens: dict[str, int]) -> int:
    """What a cache that remembers only the request before prefills."""
    total = 0
    before: Sequence[str] = ()
    for order in orders:
        shared = 0
        while shared < min(len(before), len(order)) and before[shared] == order[shared]:
            shared += 1
        total, before = total + sum(tokens[key] for key in order[shared:]), order
    return total


def cheapest_tokens(requests: Sequence[Sequence[str]], tokens: dict[str, int]) -> int:
    """Brute force over all tries: every binary tree over the requests, a node shares what its leaves have in common."""

    @cache
    def saved(members: tuple[int, ...]) -> int:
        if len(members) < 2:
            return 0
        common = frozenset.intersection(*(frozenset(requests[member]) for member in members))
        halves = [half for n in range(1, len(members)) for half in combinations(members, n)]
        split = max(saved(half) + saved(tuple(m for m in members if m not in half)) for half in halves)
        return sum(tokens[key] for key in common) + split

    return sum(tokens[key] for request in requests for key in request) - saved(tuple(range(len(requests))))


def planned(requests: Sequence[Sequence[str]], tokens: dict[str, int]) -> list[list[str]]:
    """The planned orders, checked to be one permutation of each request."""
    result = plan(requests, tokens)
    assert sorted(index for index, _ in result) == list(range(len(requests)))
    for index, order in result:
        assert sorted(order) == sorted(requests[index])
    return [order for _, order in result]


@given(BATCHES, TOKENS)
def test_costs_no_more_than_the_given_orders_and_is_served_depth_first(
    requests: list[list[str]], tokens: dict[str, int]
) -> None:
    """Remembering one prompt is enough."""
    copies = [list(request) for request in requests], dict(tokens)
    orders = planned(requests, tokens)
    assert prefilled_tokens(orders, tokens) == trie_tokens(orders, tokens) <= trie_tokens(requests, tokens)
    assert (requests, tokens) == copies, "the arguments stay as they are"


@pytest.mark.parametrize("shuffle", range(5))
def test_nested_sets_cost_no_more_than_the_largest(shuffle: int) -> None:
    requests = [list(KEYS[:n]) for n in range(len(KEYS) + 1)]
    random = Random(shuffle)
    random.shuffle(requests)
    for request in requests:
        random.shuffle(request)
    tokens = {key: 100 + n for n, key in enumerate(KEYS)}
    assert trie_tokens(planned(requests, tokens), tokens) == sum(tokens.values())


@pytest.mark.parametrize("tokens", grid([{"a": 100, "b": 100, "c": 100}, {"a": 50, "b": 210, "c": 333}], 1))
def test_optimal_for_four_requests_over_three_documents(tokens: dict[str, int]) -> None:
    subsets = [list(subset) for n in range(4) for subset in combinations("abc", n)]
    for requests in combinations_with_replacement(subsets, 4):
        everything = sum(tokens[key] for request in requests for key in request)
        saved = everything - trie_tokens(planned(requests, tokens), tokens)
        best = everything - cheapest_tokens(requests, tokens)
        assert saved == best, requests


def test_saves_nearly_what_brute_force_saves_on_random_batches() -> None:
    """Taking the heaviest pair first can cost up to half of a matching, but hardly ever does."""
    random = Random(0)
    saved_in_all, best_in_all = 0, 0
    for _ in range(length(300, 100)):
        requests = [random.sample(KEYS, random.randint(1, 5)) for _ in range(random.randint(2, 5))]
        tokens = {key: random.randint(1, 600) for key in KEYS}
        everything = sum(tokens[key] for request in requests for key in request)
        saved = everything - trie_tokens(planned(requests, tokens), tokens)
        best = everything - cheapest_tokens(requests, tokens)
        assert best / 2 <= saved <= best, requests
        saved_in_all, best_in_all = saved_in_all + saved, best_in_all + best
    assert saved_in_all >= 0.98 * best_in_all


def test_what_is_not_shared_keeps_its_order() -> None:
    tokens = dict.fromkeys(KEYS, 10)
    assert plan([["c", "a", "b"]], tokens) == [(0, ["c", "a", "b"])]
    assert plan([["c", "a", "b"], ["e", "d", "a"]], tokens) == [(0, ["a", "c", "b"]), (1, ["a", "e", "d"])]


def test_ten_thousand_documents_in_a_request_and_deeply_nested_requests() -> None:
    keys = [str(n) for n in range(10_000)]
    tokens = dict.fromkeys(keys, 7)
    assert prefilled_tokens(planned([keys, keys[::-1], keys[:9_000], []], tokens), tokens) == 70_000
    nested = [keys[:n] for n in range(0, 1_500, 5)]
    assert prefilled_tokens(planned(nested, tokens), tokens) == 7 * len(nested[-1])


def skewed(requests: int, documents: int, k: int = 5) -> list[list[str]]:
    """Requests for k distinct documents of Zipf popularity."""
    random, weights = Random(0), [1 / (rank + 1) for rank in range(documents)]
    drawn = (dict.fromkeys(random.choices(range(documents), weights, k=4 * k)) for _ in range(requests))
    return [[str(document) for document in list(draw)[:k]] for draw in drawn]


SCRIPT = """
import sys
from ragorder.trie.plan import plan
requests = [line.split() for line in sys.stdin]
print(plan(requests, {key: 100 + int(key) % 7 for request in requests for key in request}))
"""


def test_the_same_in_every_process(python: Any) -> None:
    lines = "\n".join(" ".join(request) for request in skewed(300, 60))
    outputs = {python("-c", SCRIPT, input=lines, PYTHONHASHSEED=seed).stdout for seed in ("0", "4242")}
    assert len(outputs) == 1 and len(outputs.pop()) > 300


WORKLOADS = {
    "skewed": lambda n: skewed(n, 500),
    "one shared document": lambda n: [["all", f"{i}a", f"{i}b"] for i in range(n)],
    "identical": lambda n: [["a", "b", "c"]] * n,
    "disjoint": lambda n: [[f"{i}a", f"{i}b"] for i in range(n)],
    "regions": lambda n: [[f"{i // 10} {(i + j) % 7}" for j in range(4)] for i in range(n)],
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_near_linear_in_the_number_of_requests(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bounds(monkeypatch, planned_holders=16, planned_candidates=32)
    lines = []
    for n in (200, 1_600):
        requests = WORKLOADS[workload](n)
        tokens = dict.fromkeys((key for request in requests for key in request), 100)
        with counted_lines() as count:
            plan(requests, tokens)
        lines.append(count[0])
    assert lines[1] <= 8 * 1.5 * lines[0]


def test_branching_on_popular_documents_hardly_costs_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = skewed(600, 100)
    tokens = dict.fromkeys((key for request in requests for key in request), 100)
    merged = trie_tokens(planned(requests, tokens), tokens)
    set_bounds(monkeypatch, planned_holders=32)
    assert trie_tokens(planned(requests, tokens), tokens) <= 1.03 * merged
