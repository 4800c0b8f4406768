"""What a search costs: pieces that are worth their overhead, times that are learnt, clusters dealt to cores evenly."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("faiss")

from ragorder.pipelining.search import Budget
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.running import Visits
from ragorder.pipelining.search.scanner import shares_of


def visits(rows: list[int], codes: list[int]) -> Visits:
    numbers = np.arange(len(rows))
    return Visits(np.array(rows, np.intp), numbers, numbers.astype(np.float32), np.array(codes, np.int64))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_no_core_has_more_of_one_search_than_a_third_above_what_is_possible(codes: list[int], shares: int) -> None:
    dealt = visits([0] * len(codes), codes).deal(shares)
    most = max(int(part.codes.sum()) for part in dealt)
    # Graham's bound for the largest first, against what no schedule can be better than.
    ordered = sorted(codes, reverse=True)
    possible = max(sum(codes) / shares, ordered[0], ordered[shares - 1] + ordered[shares] if len(codes) > shares else 0)
    assert most <= 4 / 3 * possible + 1


@given(st.lists(st.integers(500, 1000), min_size=200, max_size=400), st.integers(2, 6))
def test_of_many_clusters_no_core_has_one_more_than_its_share(codes: list[int], shares: int) -> None:
    dealt = visits([0] * len(codes), codes).deal(shares)
    assert len(dealt) == shares
    assert max(int(part.codes.sum()) for part in dealt) <= sum(codes) / shares + max(codes)
    # In runs: dealing by size takes longer than it saves.
    assert [number for part in dealt for number in part.clusters.tolist()] == list(range(len(codes)))


def test_little_work_is_left_to_few_cores() -> None:
    costs = ClusterCosts(1e-7, call_s=1e-5)
    assert shares_of(10, 64, costs) == 1
    assert 1 < shares_of(100_000, 64, costs) < 64
    assert shares_of(10**8, 64, costs) == 64


class TestBudget:
    @pytest.mark.parametrize("overhead_s", [1e-5, 1e-4])
    @pytest.mark.parametrize("search_s", [1.0, 10.0])
    def test_has_the_largest_gain(self, overhead_s: float, search_s: float) -> None:
        def gain(piece_s: float) -> float:
            return (search_s - piece_s) / 2 - search_s / piece_s * overhead_s

        best = Budget(overhead_s).limit(4 * search_s, 0, 4)
        assert not best.whole
        assert all(gain(best.seconds) >= gain(best.seconds * factor) for factor in (0.5, 0.8, 1.25, 2.0))
        assert gain(best.seconds) > 0

    def test_cuts_into_equal_pieces_which_grow_with_the_searches_that_wait_for_a_core(self) -> None:
        assert Budget(1e-3).limit(0.16, 0, 1).seconds == pytest.approx(0.16 / 3)
        alone, others = (Budget(1e-5).limit(40.0, waiting, 4).seconds for waiting in (0, 8))
        assert others == pytest.approx(3 * alone, rel=0.01)

    @pytest.mark.parametrize("search_s", [0.01, 0.06, 0.1, 1.0, 30.0])
    @pytest.mark.parametrize("waiting", [0, 1, 50])
    def test_spends_at_most_two_percent_on_pieces_of_searches_that_are_cut(self, search_s: float, waiting: int) -> None:
        limit = Budget(1e-3).limit(64 * search_s, waiting, 64)
        assert limit.whole or limit.seconds >= 0.05
        assert limit.seconds <= max(search_s, 0.05) or waiting

    @pytest.mark.parametrize(("overhead_s", "search_s", "waiting"), [(1e-3, 0.09, 0), (1e-3, 0.04, 1), (1e-4, 0.5, 99)])
    def test_leaves_searches_whole_without_a_gain(self, overhead_s: float, search_s: float, waiting: int) -> None:
        limit = Budget(overhead_s).limit(search_s, waiting, 1)
        assert limit.whole
        assert limit.seconds >= search_s

    def test_has_clusters_enough_to_be_dealt_out_evenly_while_searches_wait(self) -> None:
        assert Budget(1e-5).limit(4.0, 1, 4, cluster_s=0.02).seconds == pytest.approx(1 / 3)
        assert Budget(1e-5).limit(4.0, 1, 4, cluster_s=0.1).whole
        assert Budget(1e-5).limit(4.0, 0, 4, cluster_s=0.1).seconds < 0.02
        assert Budget(1e-5).limit(4.0, 1, 1, cluster_s=0.1).seconds < 0.02

    def test_learns_the_overhead_unless_it_is_given(self) -> None:
        """An interrupted piece counts as a few."""
        learnt, given = Budget(), Budget(1e-3)
        for overhead_s in [4e-4] * 50 + [1.0]:
            for budget in (learnt, given):
                budget.learn(overhead_s)
        assert 4e-4 < learnt.overhead_s < 8e-4 and given.overhead_s == 1e-3


class TestCosts:
    def test_are_learnt_from_calls_of_several_sizes(self) -> None:
        costs, rng = ClusterCosts(1e-6), Random(0)
        for _ in range(300):
            codes = rng.randrange(100, 20_000)
            costs.learn(codes, (9e-5 + 77e-9 * codes) * rng.uniform(0.9, 1.1))
        assert costs.code_s == pytest.approx(77e-9, rel=0.05)
        assert costs.seconds(10_000) == pytest.approx(9e-5 + 77e-5, rel=0.05)

    def test_follow_a_machine_that_changes(self) -> None:
        costs = ClusterCosts(1e-7)
        for code_s in (1e-7, 1e-6):
            for number in range(600):
                costs.learn(1000 + number % 7 * 1000, code_s * (1000 + number % 7 * 1000))
        assert costs.code_s == pytest.approx(1e-6, rel=0.05)

    def test_of_calls_of_one_size_are_right_at_that_size_and_hardly_change_by_an_interrupted_call(self) -> None:
        for seconds in (1e-5, 5e-4, 1e-3, 1e-1):
            costs = ClusterCosts(1e-7)
            for _ in range(200):
                costs.learn(5000, seconds)
            assert costs.seconds(5000) == pytest.approx(seconds)
            assert costs.code_s > 0 and costs.call_s >= 0
            costs.learn(5000, 20_000 * seconds)
            assert costs.seconds(5000) < 1.2 * seconds

    def test_do_not_change_by_calls_that_scan_nothing(self) -> None:
        costs = ClusterCosts(1e-7)
        costs.learn(0, 1.0)
        assert costs.seconds(1000) == pytest.approx(5e-5 + 1e-4)
