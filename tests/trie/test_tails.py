"""Tail policies: in which order the documents follow the cached prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import counted_lines

from ragorder.eval.running.policies import FrequencyTail, PopularityTail
from ragorder.trie.tail import CohortTail, FreeTail, GatedTail, QueueTail, RankTail, Tail

shared = settings(suppress_health_check=[HealthCheck.differing_executors])
"""For properties that several classes inherit: each runs them on another implementation."""

KEYS = "abcdefgh"
REQUESTS = st.permutations(KEYS).flatmap(lambda keys: st.integers(0, len(keys)).map(lambda n: keys[:n]))
HISTORIES = st.lists(REQUESTS, max_size=12)
QUEUES = st.lists(st.frozensets(st.sampled_from([*KEYS, "x", "y"])), max_size=6)


class Requested:
    def __init__(self, keys: Sequence[str], tokens: Sequence[int] = ()) -> None:
        self.keys = keys
        self.tokens = tokens or [100] * len(keys)
        self.token_ids: Sequence[Sequence[int]] = ()


def arrange(
    tail: Tail,
    keys: Sequence[str],
    waiting: Sequence[str | frozenset[str]] = (),
    prefix: Sequence[int] = (),
    history: Sequence[Sequence[str]] = (),
) -> str:
    """The documents after the prefix, after these requests and for these waiting ones."""
    for earlier in history:
        tail.observe(Requested(earlier))
    rest = [rank for rank in range(len(keys)) if rank not in prefix]
    arranged = tail.arrange(Requested(keys), prefix, rest, [frozenset(wanted) for wanted in waiting])
    return "".join(keys[rank] for rank in arranged)


class TailContract:
    """What every tail does."""

    make: Callable[[], Tail]

    @shared
    @given(HISTORIES, REQUESTS, QUEUES, st.data())
    def test_gives_a_permutation_of_the_rest(
        self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]], data: st.DataObject
    ) -> None:
        prefix = data.draw(st.permutations(range(len(keys)))) if keys else []
        prefix = prefix[: data.draw(st.integers(0, len(keys)))]
        tail = type(self).make()
        for earlier in [*history, keys]:
            tail.observe(Requested(earlier))
        rest = [rank for rank in range(len(keys)) if rank not in prefix]
        assert sorted(tail.arrange(Requested(keys), prefix, list(rest), waiting)) == rest

    @shared
    @given(HISTORIES, REQUESTS, QUEUES)
    def test_is_deterministic(self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]]) -> None:
        one, other = (arrange(type(self).make(), keys, waiting, (), [*history, keys]) for _ in range(2))
        assert one == other

    @shared
    @given(HISTORIES, REQUESTS, QUEUES)
    def test_arranging_changes_no_later_arrangement(
        self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]]
    ) -> None:
        tail = type(self).make()
        first = arrange(tail, keys, waiting, (), [*history, keys])
        assert arrange(tail, keys, waiting) == first

    def test_without_history_and_queue_rank_order_is_kept(self) -> None:
        assert arrange(type(self).make(), "dbca", prefix=[2], history=["dbca"]) == "dba"

    def test_steps_grow_no_faster_than_documents(self) -> None:
        steps = []
        for count in (250, 1_000):
            keys, tail = [f"d{number}" for number in range(count)], type(self).make()
            waiting = [frozenset(keys[::step]) for step in range(1, 9)]
            with counted_lines() as lines:
                tail.observe(Requested(keys))
                arranged = tail.arrange(Requested(keys), [], list(range(count)), waiting)
            assert sorted(arranged) == list(range(count))
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]


class TestRank(TailContract):
    make = RankTail

    @given(HISTORIES, REQUESTS, QUEUES)
    def test_always_keeps_rank_order(
        self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]]
    ) -> None:
        assert arrange(RankTail(), keys, waiting, (), history) == "".join(keys)


class TestFrequency(TailContract):
    make = FrequencyTail

    @given(HISTORIES, REQUESTS)
    def test_frequency_is_the_order_of_decayed_counts(self, history: list[list[str]], keys: list[str]) -> None:
        counts = dict.fromkeys(KEYS, 0.0)
        for number, request in enumerate(history):
            for key in request:
                counts[key] += 0.5 ** ((len(history) - 1 - number) / 3)
        arranged = arrange(FrequencyTail(half_life=3), keys, history=history)
        for before, after in pairwise(arranged):
            same = math.isclose(counts[before], counts[after], rel_tol=1e-9)
            assert same or counts[before] > counts[after]

    @pytest.mark.parametrize(("requests_between", "first"), [(9, "a"), (11, "b")])
    def test_a_request_counts_half_after_the_half_life(self, requests_between: int, first: str) -> None:
        """Two requests for `a`, then others, then one for `b`."""
        tail = FrequencyTail(half_life=10)
        history = ["a", "a", *["z"] * (requests_between - 1), "b"]
        assert arrange(tail, "ba" if first == "a" else "ab", history=history)[0] == first

    def test_counts_do_not_overflow(self) -> None:
        tail = FrequencyTail(half_life=1)
        for _ in range(5_000):
            tail.observe(Requested("a"))
            tail.observe(Requested("b"))
        assert arrange(tail, "xab", history=["ab", "a"]) == "abx"

    def test_of_many_documents_the_rarer_ones_are_forgotten(self) -> None:
        tail = FrequencyTail(max_documents=10)
        tail.observe(Requested(["rare"]))
        for number in range(20):
            tail.observe(Requested(["popular", str(number)]))
        assert tail.arrange(Requested(["new", "rare", "popular"]), [], [0, 1, 2], ()) == [2, 0, 1]


class WithQueue(TailContract):
    """What the tails that look at the waiting requests do while there are some."""

    def test_documents_not_waited_for_come_last_in_the_order_of_the_fallback(self) -> None:
        assert arrange(type(self).make(), "abcd", ["d"]) == "dabc"

    @shared
    @given(HISTORIES, REQUESTS, QUEUES, st.integers(0, 8))
    def test_each_document_is_the_most_wanted_by_requests_that_share_all_before_it(
        self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]], cached: int
    ) -> None:
        prefix = range(len(keys))[:cached]
        arranged = arrange(type(self).make(), keys, waiting, prefix, history)
        for place, key in enumerate(arranged):
            sharing = [wanted for wanted in waiting if wanted.issuperset([*keys[:cached], *arranged[:place]])]
            wanted_by = {other: sum(other in wanted for wanted in sharing) for other in arranged[place:]}
            assert wanted_by[key] == max(wanted_by.values())


class TestQueue(WithQueue):
    @staticmethod
    def make() -> Tail:
        return QueueTail(RankTail())

    @given(HISTORIES, REQUESTS)
    def test_falls_back_without_a_queue(self, history: list[list[str]], keys: list[str]) -> None:
        frequency = arrange(FrequencyTail(), keys, history=history)
        assert arrange(QueueTail(FrequencyTail()), keys, history=history) == frequency
        assert arrange(QueueTail(RankTail()), keys, history=history) == "".join(keys)


class TestPopularity(TailContract):
    make = PopularityTail

    @given(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 200)), st.permutations(KEYS))
    def test_orders_by_classes_of_popularity(self, popularity: dict[str, int], keys: list[str]) -> None:
        history = [[key] for key, count in popularity.items() for _ in range(count)] + [keys]
        counts = dict.fromkeys(KEYS, 0.0)
        for number, request in enumerate(history):
            for key in request:
                counts[key] += 0.5 ** ((len(history) - 1 - number) / 300)
        arranged = arrange(PopularityTail(), keys, history=history)
        rank = {key: place for place, key in enumerate(keys)}
        for place, before in enumerate(arranged):
            for after in arranged[place + 1 :]:
                assert counts[after] < 8.001 * counts[before], "eight times more popular: comes first"
                assert rank[before] < rank[after] or counts[before] > counts[after], "moved ahead only if more popular"


OTHERS = [["x"]] * 32
"""Requests until those before them vote."""


class TestCohort(TailContract):
    make = CohortTail

    def test_documents_that_were_requested_together_come_first_together(self) -> None:
        history = [*["cd"] * 20, *["ab"] * 10, *OTHERS, "zacd"]
        assert arrange(CohortTail(), "zacd", history=history) == "cdza"

    def test_each_document_is_chosen_for_the_requests_with_all_before_it(self) -> None:
        """c is more popular than d, but not in requests with a."""
        history = [*["ad"] * 20, *["c"] * 15, *["cb"] * 4, *OTHERS, "bcda"]
        assert arrange(CohortTail(), "bcda", history=history)[:2] == "da"
        assert arrange(CohortTail(), "bcda", history=history, prefix=[3])[0] == "d"
        assert arrange(CohortTail(), "bcda", history=history, prefix=[1])[0] == "b"

    def test_a_longer_document_saves_more(self) -> None:
        tail = CohortTail()
        for earlier in [*["ab", "a", "b"] * 20, *OTHERS]:
            tail.observe(Requested(earlier))
        assert tail.arrange(Requested("ab", [100, 400]), (), [0, 1], ()) == [1, 0]
        assert tail.arrange(Requested("ab", [400, 100]), (), [0, 1], ()) == [0, 1]

    @pytest.mark.parametrize(("min_gain", "arranged"), [(0, "cab"), (10, "cab"), (1e6, "abc"), (math.inf, "abc")])
    def test_a_document_moves_only_where_that_pays(self, min_gain: float, arranged: str) -> None:
        assert arrange(CohortTail(min_gain), "abc", history=[*["c"] * 40, *OTHERS, "abc"]) == arranged

    @given(HISTORIES, REQUESTS, st.floats(0, 1e4))
    def test_a_higher_price_never_moves_the_first_document_further(
        self, history: list[list[str]], keys: list[str], min_gain: float
    ) -> None:
        history = [*history * 8, *OTHERS, keys]
        near = arrange(CohortTail(2 * min_gain), keys, history=history)
        far = arrange(CohortTail(min_gain), keys, history=history)
        assert not keys or keys.index(near[0]) <= keys.index(far[0])

    def test_the_latest_requests_do_not_vote(self) -> None:
        assert arrange(CohortTail(), "abc", history=["c"] * 30) == "abc"

    def test_bursts_keep_the_documents_of_ranks_that_bursts_kept(self) -> None:
        """Follow-up requests keep ranks 2 and 3 of the one before, never rank 1."""
        tail = CohortTail()
        for number in range(200):
            for first in "ad":
                tail.observe(Requested([f"{number}{first}", f"{number}b", f"{number}c"]))
        assert tail.arrange(Requested(["new a", "new b", "new c"]), (), [0, 1, 2], ()) == [1, 2, 0]

    @given(HISTORIES, REQUESTS)
    def test_a_preview_sees_and_changes_what_the_request_would(self, history: list[list[str]], keys: list[str]) -> None:
        one, other = CohortTail(), CohortTail()
        for earlier in [*history * 8, *OTHERS]:
            one.observe(Requested(earlier))
            other.observe(Requested(earlier))
        rest = list(range(len(keys)))
        with one.observing(Requested(keys)):
            preview = one.arrange(Requested(keys), (), list(rest), ())
        for tail in (one, other):
            tail.observe(Requested(keys))
            assert tail.arrange(Requested(keys), (), list(rest), ()) == preview

    def test_a_copy_learns_by_itself(self) -> None:
        tail = CohortTail()
        for earlier in [*["ab"] * 20, *OTHERS]:
            tail.observe(Requested(earlier))
        copy = tail.copy()
        for earlier in [*["c"] * 60, *OTHERS]:
            copy.observe(Requested(earlier))
        assert arrange(tail, "cba") == "bac"
        assert arrange(copy, "cba") == "cba"


class TestGated(TailContract):
    make = GatedTail

    @given(HISTORIES, REQUESTS, st.data())
    def test_a_forecast_is_of_all_the_rest_though_a_part_was_arranged_before(
        self, history: list[list[str]], keys: list[str], data: st.DataObject
    ) -> None:
        tail, ungated, request = GatedTail(), CohortTail(), Requested(keys)
        tail.pays = True
        for earlier in [*history * 8, *OTHERS, keys]:
            tail.observe(Requested(earlier))
            ungated.observe(Requested(earlier))
        rest = list(range(len(keys)))
        computed = data.draw(st.lists(st.sampled_from(rest), unique=True).map(sorted) if rest else st.just([]))
        tail.arrange(request, (), computed, ())
        assert tail.forecast(request, (), rest) == ungated.arrange(request, (), rest, ())


class TestFree(WithQueue):
    make = FreeTail

    @given(HISTORIES, REQUESTS)
    def test_without_a_queue_is_the_cohort_tail(self, history: list[list[str]], keys: list[str]) -> None:
        history = [*history * 20, keys]
        assert arrange(FreeTail(), keys, (), (), history) == arrange(CohortTail(), keys, (), (), history)

    @given(HISTORIES, REQUESTS, QUEUES.filter(bool))
    def test_with_a_queue_is_the_queue_tail(
        self, history: list[list[str]], keys: list[str], waiting: list[frozenset[str]]
    ) -> None:
        """In short histories nothing votes, and the fallback is rank order."""
        few = [*history[:6], keys]
        assert arrange(FreeTail(), keys, waiting, (), few) == arrange(QueueTail(RankTail()), keys, waiting, (), few)
