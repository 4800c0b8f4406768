"""Where the most relevant document stands: first or last, unless that costs too many cached tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import (
    MOVES,
    STREAMS,
    documents,
    ids,
    serve,
    strict,
)

from ragorder import History, Orderer
from ragorder.trie.histories import Segment


class TestBestPlace:
    """Where the most relevant document stands: first or last, unless that costs too many cached tokens."""

    LISTS = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=6)

    @pytest.mark.parametrize(("best", "expected"), [("last", "bcdea"), ("first", "abcde"), ("any", "abcde")])
    def test_of_documents_that_are_not_cached(self, best: Any, expected: str) -> None:
        assert serve(strict(best=best), "xyz", "abcde") == expected

    @given(st.sampled_from(["first", "last"]), st.sampled_from(MOVES), STREAMS, LISTS)
    def test_is_its_own_at_any_price(self, best: Any, moves: str, earlier: list[list[str]], request: list[str]) -> None:
        orderer = strict(best=best, best_tokens=1_000_000, moves=moves)
        serve(orderer, *earlier)
        ordering = orderer.order(documents(request), waiting=[*map(documents, earlier)])
        assert ordering.permutation[0 if best == "first" else -1] == 0

    @pytest.mark.parametrize(
        ("best", "best_tokens", "expected"),
        [
            ("last", 0, "abc"),
            ("last", 63, "abc"),
            ("last", 64, "acb"),
            ("first", 95, "abc"),
            ("first", 96, "bca"),
        ],
    )
    def test_is_weighed_against_the_cached_tokens(self, best: Any, best_tokens: int, expected: str) -> None:
        """`abc` is cached, 32 tokens each, and rank order is `bca`: last, its place costs two of them, first all."""
        orderer = strict(best=best, best_tokens=best_tokens, moves="prefix")
        orderer.record(documents("abc"))
        assert ids(orderer.order(documents("bca"))) == expected

    def test_what_follows_a_prefix_that_holds_the_best_has_the_next_best_last(self) -> None:
        orderer = strict(best="last", best_tokens=0)
        serve(orderer, "ba")
        assert serve(orderer, "bacd") == "abdc"

    @given(st.sampled_from(["first", "last"]), st.sampled_from([0, 32, 1000]), STREAMS, LISTS)
    def test_a_recurring_list_makes_the_same_prompt_and_is_found_whole(
        self, best: Any, best_tokens: int, between: list[list[str]], request: list[str]
    ) -> None:
        orderer = strict(best=best, best_tokens=best_tokens, block_size=1, capacity_tokens=None)
        first = serve(orderer, request)
        serve(orderer, *between)
        again = orderer.order(documents(request))
        assert again.cached_tokens == 32 * len(request)
        assert ids(again) == first or set(request) in map(set, between)

    @pytest.mark.parametrize(
        ("guard", "expected"),
        [
            ({"keep_last": 2}, "cdeba"),
            ({"max_displacement": 0}, "abcde"),
            ({"max_displacement": 2}, "bcade"),
            ({"max_gain_lost": 0.0}, "abcde"),
            ({"keep_groups": True}, "abcde"),
        ],
        ids=str,
    )
    def test_guards_hold(self, guard: dict[str, Any], expected: str) -> None:
        assert serve(strict(best="last", group=lambda _: "one", **guard), "abcde") == expected

    def test_a_guard_that_keeps_it_from_its_place_costs_no_cached_tokens(self) -> None:
        orderer = strict(best="last", best_tokens=1000, max_displacement=1)
        orderer.record(documents("bac"))
        assert ids(orderer.order(documents("abc"))) == "bac"

    @pytest.mark.parametrize(("best_tokens", "expected"), [(0, {"xab", "xac"}), (32, {"xba", "xca"})])
    def test_a_batch_weighs_its_place_as_well(self, best_tokens: int, expected: set[str]) -> None:
        """Both requests have `a` as the best document."""
        batch = strict(best="last", best_tokens=best_tokens).order_batch(map(documents, ["axb", "axc"]))
        assert {ids(ordering) for ordering in batch} == expected

    @pytest.mark.parametrize(
        "make",
        [
            lambda **options: Orderer.for_cloud("anthropic", model="claude-opus-5", clock=lambda: 0.0, **options),
            lambda **options: strict(capacity_tokens=4_000, host_tokens=8_000, **options),
            lambda **options: strict(search="greedy", **options),
        ],
        ids=["cloud", "tiers", "greedy"],
    )
    def test_other_caches_and_searches_keep_it_too(self, make: Any) -> None:
        orderer, rng = make(best="last", best_tokens=1_000_000), random.Random(0)
        cached_tokens = 0
        for _ in range(60):
            ordering = orderer.order(documents(rng.sample("abcdefgh", 4), tokens=400))
            assert ordering.permutation[-1] == 0
            cached_tokens += ordering.cached_tokens
            ordering.confirm()
        assert orderer.fallbacks == 0
        assert cached_tokens > 0

    def test_in_a_conversation_it_is_next_to_the_question_too(self) -> None:
        orderer = strict(best="last")
        history = History([Segment("told", 40)], question=Segment("asked", 10))
        assert serve(orderer, "abc", history=history) == "bca"
        assert orderer.order(documents("abc"), history=history).prefix_documents == 3
