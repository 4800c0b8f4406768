"""Shards of a batch: each request in one of them, requests that share documents together, tenants apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rings import grid

from ragorder.eval.data.workloads import document_tokens, make_workload
from ragorder.trie.plan import Planned, plan
from ragorder.trie.shards import ShardPaths, ShardRequest, plan_in_shards, shared_documents

KEYS = "abcdefgh"
TOKENS = st.fixed_dictionaries({key: st.integers(0, 600) for key in KEYS})
BATCHES = st.lists(st.permutations(KEYS).flatmap(lambda keys: st.integers(0, 8).map(lambda n: keys[:n])), max_size=30)


def saved_tokens(planned: Sequence[Planned], tokens: Callable[[Any], int] = document_tokens) -> int:
    """What a cache that remembers the request before saves."""
    saved, before = 0, list[Any]()
    for _, order in planned:
        saved += sum(map(tokens, order[: shared_documents(before, order)]))
        before = order
    return saved


@cache
def rankings(workload: str, requests: int) -> list[list[int]]:
    return make_workload(workload, 0, requests=requests).rankings[:requests]


@cache
def saved_by_one_plan(workload: str, requests: int) -> int:
    return saved_tokens(plan(rankings(workload, requests), lengths(workload, requests)))


def saved_by_shards(paths: ShardPaths, workload: str, requests: int) -> int:
    members: dict[int, list[list[int]]] = {}
    for number, ranking in enumerate(rankings(workload, requests)):
        members.setdefault(paths.shard(numbered(ranking), number), []).append(ranking)
    return sum(saved_tokens(plan(each, lengths(workload, requests))) for each in members.values())


def lengths(workload: str, requests: int) -> dict[int, int]:
    return {number: document_tokens(number) for ranking in rankings(workload, requests) for number in ranking}


def numbered(ranking: Sequence[int], scope: int | None = None) -> ShardRequest:
    return ShardRequest(ranking, [document_tokens(number) for number in ranking], scope)


class TestPlan:
    @given(BATCHES, TOKENS, st.integers(1, 9))
    def test_every_request_comes_once_with_all_its_documents(
        self, requests: list[list[str]], tokens: dict[str, int], shards: int
    ) -> None:
        planned = plan_in_shards(requests, tokens, shards)
        assert len(planned) == shards
        orders = [each for shard in planned for each in shard]
        assert sorted(index for index, _ in orders) == list(range(len(requests)))
        for index, order in orders:
            assert sorted(order) == sorted(requests[index])

    @given(BATCHES, TOKENS)
    def test_one_shard_is_one_plan(self, requests: list[list[str]], tokens: dict[str, int]) -> None:
        assert plan_in_shards(requests, tokens, 1) == [plan(requests, tokens)]

    @pytest.mark.parametrize(("workload", "requests"), [("mix64", 6000), ("zipf10", 3000)])
    def test_saves_nearly_what_one_plan_saves(self, workload: str, requests: int) -> None:
        planned = plan_in_shards(rankings(workload, requests), lengths(workload, requests), 8)
        assert sum(map(saved_tokens, planned)) >= 0.97 * saved_by_one_plan(workload, requests)

    @pytest.mark.parametrize("workload", grid(["zipf10", "mix64", "unique", "paper"], 2))
    def test_shards_are_about_equal(self, workload: str) -> None:
        given = rankings(workload, 3000)
        planned = plan_in_shards(given, lengths(workload, 3000), 8)
        sizes = [sum(document_tokens(number) for _, order in shard for number in order) for shard in planned]
        assert max(sizes) <= 1.4 * sum(sizes) / len(sizes)


class TestPaths:
    def test_begin_with_the_tenant_then_with_what_shares_most(self) -> None:
        requests = [numbered(ranking, scope=7) for ranking in ([1, 2, 9], [2, 3], [1, 2, 9], [3, 2], [4, 3])]
        paths = ShardPaths.of(requests, 2)
        assert paths.branch(requests[0])[0] < 0
        first, second, _, _, last = (paths.branch(request)[1:] for request in requests)
        assert (sorted(first), sorted(second), last) == ([1, 2, 9], [2, 3], [3, 4])

    def test_a_document_of_a_topic_counts_more_than_one_that_all_topics_have(self) -> None:
        rng = random.Random(0)
        topics = [topic for topic in range(20) for _ in range(50)]
        rng.shuffle(topics)
        given = [[0, *(10 * topic + each for each in rng.sample(range(1, 9), 5))] for topic in topics]
        requests = [numbered(ranking) for ranking in given]
        paths = ShardPaths.of(requests, 4)
        assert {paths.branch(request).index(0) for request in requests} == {5}

    def test_a_long_document_counts_more_than_a_short_one(self) -> None:
        given = [([1, 2], [1000, 10]), ([2, 3], [10, 10]), ([1, 4], [1000, 10]), ([2, 5], [10, 10])]
        requests = [ShardRequest(*each) for each in given]
        assert ShardPaths.of(requests, 2).branch(requests[0]) == [1, 2]

    def test_documents_in_another_order_are_the_same_request(self) -> None:
        given = rankings("mix64", 2000)
        paths = ShardPaths.of([numbered(ranking) for ranking in given], 16)
        for ranking in given[::50]:
            assert paths.shard(numbered(ranking[::-1])) == paths.shard(numbered(ranking))

    @pytest.mark.parametrize(("groups", "place"), [(160, 0), (80, 1)], ids=["popular document", "next document"])
    def test_groups_no_larger_than_a_part_of_a_shard_stay_together(self, groups: int, place: int) -> None:
        """Requests of one document or, where all share the first one, of the next."""
        first = [0] * place
        given = [[*first, group, 1000 + 10 * group + other] for group in range(1, groups + 1) for other in range(5)]
        random.Random(0).shuffle(given)
        paths = ShardPaths.of([numbered(ranking) for ranking in given], 4)
        found: dict[int, set[int]] = {}
        for number, ranking in enumerate(given):
            found.setdefault(ranking[place], set()).add(paths.shard(numbered(ranking), number))
        assert {len(shards) for shards in found.values()} == {1}
        assert len(set().union(*found.values())) == 4

    def test_equal_requests_are_spread_by_their_numbers(self) -> None:
        same = numbered([1, 2, 3])
        paths = ShardPaths.of([same] * 400, 4)
        found = Counter(paths.shard(same, number) for number in range(400))
        assert set(found) == {0, 1, 2, 3} and max(found.values()) <= 130

    def test_what_was_not_counted_has_a_shard(self) -> None:
        given = [numbered(ranking) for ranking in rankings("mix64", 2000)]
        paths = ShardPaths.of(given[::10], 8)
        others = [*given, numbered([]), numbered([10**9]), numbered([1], scope=3)]
        assert {paths.shard(request, number) for number, request in enumerate(others)} <= set(range(8))

    def test_a_sample_is_nearly_as_good(self) -> None:
        given = rankings("mix64", 6000)
        paths = ShardPaths.of([numbered(ranking) for ranking in given[::5]], 8)
        assert saved_by_shards(paths, "mix64", 6000) >= 0.95 * saved_by_one_plan("mix64", 6000)

    def test_without_room_for_all_counts_requests_that_share_still_meet(self) -> None:
        """Far better than shards by chance, which share less than half."""
        paths = ShardPaths.of([numbered(ranking) for ranking in rankings("mix64", 3000)], 8, most_documents=40)
        assert saved_by_shards(paths, "mix64", 3000) >= 0.8 * saved_by_one_plan("mix64", 3000)


class TestTenants:
    def test_a_small_tenant_is_in_one_shard(self) -> None:
        requests = [numbered(ranking, number % 200) for number, ranking in enumerate(rankings("mix64", 2000))]
        paths = ShardPaths.of(requests, 4)
        found: dict[int | None, set[int]] = {}
        for request in requests:
            found.setdefault(request.scope, set()).add(paths.shard(request))
        assert {len(shards) for shards in found.values()} == {1}

    def test_have_numbers_of_their_own_for_the_same_documents(self) -> None:
        of_all = [ShardRequest.of(["a", "b"], [1, 1], scope) for scope in (None, "one", "two", "")]
        assert len({number for request in of_all for number in request.documents}) == 8
        assert len({request.scope for request in of_all}) == 4


class TestNumbers:
    def test_are_the_same_in_every_process(self) -> None:
        assert list(ShardRequest.of(["a", "ü", "\ud800"], [1, 1, 1]).documents) == [
            ShardRequest.of([name], [1]).documents[0] for name in ("a", "ü", "\ud800")
        ]
        assert ShardRequest.of(["a"], [1]).documents[0] == 0x207C4F1CADB32117

    @given(st.lists(st.sampled_from("abc"), max_size=8))
    def test_of_a_request_are_distinct(self, names: list[str]) -> None:
        documents = ShardRequest.of(names, [1] * len(names)).documents
        assert len(set(documents)) == len(names)
        assert all(0 <= number < 1 << 63 for number in documents)
