"""Remembered requests, and the forecast of those to come."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder.orderer import Orderer
from ragorder.trie.cohorts import Cohorts
from ragorder.trie.expected_uses import HORIZON, ExpectedUses

REQUESTS = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6), max_size=60)


class TestCohorts:
    @given(REQUESTS, st.integers(1, 20), st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=3))
    def test_counts_the_remembered_requests_with_all_of_some_documents(
        self, requests: list[list[str]], size: int, wanted: list[str]
    ) -> None:
        cohorts = Cohorts(size)
        for number, request in enumerate(requests, 1):
            cohorts.add(request)
            shared = -1
            for key in wanted:
                shared &= cohorts.masks.get(key, 0)
            remembered = requests[max(0, number - size) : number]
            assert shared.bit_count() == sum(set(wanted) <= set(each) for each in remembered)
            assert len(cohorts) == len(remembered)

    @given(REQUESTS, st.integers(1, 20), st.data())
    def test_masks_of_the_latest_requests(self, requests: list[list[str]], size: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, size))
        cohorts = Cohorts(size)
        for request in requests:
            cohorts.add(request)
        remembered = requests[-size:]
        latest = requests[-count:] if count else []
        latest = latest[-len(remembered) :] if remembered else []
        mask = cohorts.masks.get("a", 0)
        assert (mask & cohorts.latest(count)).bit_count() == sum("a" in request for request in latest)
        if mask:
            assert cohorts.newest(mask) == next(each for each in reversed(remembered) if "a" in each)

    def test_forgets_requests_rather_than_remember_too_many_documents(self) -> None:
        cohorts = Cohorts(100, max_documents=10)
        for number in range(50):
            cohorts.add([f"{number}a", f"{number}b", "common"])
            assert len(cohorts.masks) <= 10
        assert len(cohorts) == 4
        cohorts.add([f"many {number}" for number in range(11)])
        assert not cohorts.masks
        assert not len(cohorts)


def along(uses: ExpectedUses, keys: Sequence[str]) -> list[float]:
    """The expected requests with the first document, the first two, …"""
    uses.learn()
    return [uses.joined(keys, range(place), [place])[0] for place in range(len(keys))]


def learnt(requests: Sequence[Sequence[str]]) -> ExpectedUses:
    uses = ExpectedUses()
    for request in requests:
        uses.observe(request)
    return uses


class TestExpectedUses:
    def test_nothing_is_expected_at_first(self) -> None:
        assert along(ExpectedUses(), ["a", "b"]) == [0, 0]

    def test_what_recurs_at_a_steady_rate_is_expected_at_that_rate(self) -> None:
        """a in half of the requests, b in a tenth, both with probability 0.05."""
        rng = random.Random(0)
        requests = [
            [f"only {number}", *(key for key, share in (("a", 0.5), ("b", 0.1)) if rng.random() < share)]
            for number in range(4_000)
        ]
        expected = along(learnt(requests), ["a", "b"])
        assert expected[0] == pytest.approx(0.5 * HORIZON, rel=0.2)
        assert expected[1] == pytest.approx(0.05 * HORIZON, rel=0.4)

    def test_what_is_over_after_a_while_is_not_expected_to_recur(self) -> None:
        """Documents are requested 100 or 50 times in a row and never again: many votes, few later requests."""
        over = learnt([[f"a{number // 100}", f"b{number // 50}"] for number in range(4_000)])
        steady = learnt([["a", "b"] if number % 2 else ["a", f"{number}"] for number in range(4_000)])
        assert over.per_vote < 0.1 * steady.per_vote

    def test_in_the_long_run_paths_are_used_as_often_as_so_far_and_once_more(self) -> None:
        requests = [["a", "b"] if number % 400 == 0 else ["a", f"{number}"] for number in range(2_000)]
        assert learnt([*requests, ["b", "a"]]).in_the_long_run(["a", "b", "new"]) == [2_001, 6, 1]

    def test_in_the_long_run_the_present_burst_counts(self) -> None:
        """Ten requests in a row share three documents."""
        uses = learnt([[f"{number // 10} {document}" for document in "abc"] for number in range(1_000)])
        (first, *_) = uses.in_the_long_run(["99 a", "99 b"])
        assert 9 + 1 < first < 9 + 1 + 30

    def test_in_the_long_run_what_is_shared_at_any_distance_is_no_burst(self) -> None:
        """Of few documents, all requests share some."""
        rng = random.Random(0)
        requests = [rng.sample("abcdefgh", 5) for _ in range(2_000)]
        uses, votes = learnt(requests), sum({"a", "b"} <= set(request) for request in requests[:-1])
        assert uses.in_the_long_run(["a", "b"])[1] == pytest.approx(votes + 1, abs=1)

    def test_expectations_never_grow_along_a_path(self) -> None:
        rng = random.Random(1)
        uses = learnt([rng.sample("abcdefghij", 4) for _ in range(500)])
        expected = along(uses, "abcdefghij")
        assert all(later <= former for former, later in pairwise(expected))

    def test_documents_are_expected_together_with_each_of_others(self) -> None:
        """As along the path that ends with it; nothing is learnt by it."""
        rng = random.Random(1)
        uses = learnt([rng.sample("abcdefghij", 4) for _ in range(500)])
        uses.learn()
        keys = list("abcdefghij")
        alone, after = uses.joined(keys, [], range(10)), uses.joined(keys, [0, 1], [2, 5])
        votes = (uses.voters & uses.cohorts.masks["a"] & uses.cohorts.masks["b"] & uses.cohorts.masks["f"]).bit_count()
        burst = uses.burst * uses.kept[0] * uses.kept[1] * uses.kept[5]
        assert after[1] == pytest.approx(uses.per_vote * votes + burst)
        assert 0 < after[1] < alone[5]
        uses.observe(["new"])
        added = uses.cohorts.added
        assert uses.joined(["new"], [], [0]) == [pytest.approx(uses.burst * uses.kept[0])]
        assert uses.cohorts.added == added

    @pytest.mark.parametrize("requests", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
    def test_memory_is_flat(self, requests: int) -> None:
        """Requests for 5 of 50,000 documents, skewed."""
        rng = random.Random(0)
        uses, sizes = ExpectedUses(), []
        for number in range(1, requests + 1):
            uses.observe([f"d{int(50_000 * rng.random() ** 2)}" for _ in range(5)])
            if number in (5_000, requests):
                masks = uses.cohorts.masks
                sizes.append(sys.getsizeof(masks) + sum(map(sys.getsizeof, masks.values())))
        assert sizes[1] < 1.2 * sizes[0] < 3_000_000


def orderer_of_names(**options: Any) -> Orderer:
    return Orderer(block_size=1, key=str, **{"tokens": lambda _: 10, "strict": True} | options)


class TestTheForecastOfAnOrdering:
    def test_is_of_the_paths_in_prompt_order(self) -> None:
        orderer = orderer_of_names()
        for documents in ("abc", "abd", "ae"):
            orderer.order(documents).confirm()
        ordering = orderer.order("ab")
        assert ordering.documents == ["a", "b"]
        assert list(ordering.expected_uses) == [4, 3], "with those before"

    def test_a_tenant_does_not_raise_anothers(self) -> None:
        orderer = orderer_of_names()
        for _ in range(50):
            orderer.order("ab", scope="red").confirm()
        assert list(orderer.order("ab", scope="blue").expected_uses) == [1, 1]

    @pytest.mark.parametrize("options", [{"moves": "prefix"}, {"tokens": lambda _: -1, "strict": False}])
    def test_a_tail_without_memory_and_retrieval_order_after_an_error_have_none(self, options: dict[str, Any]) -> None:
        assert list(orderer_of_names(**options).order("ab").expected_uses) == []
