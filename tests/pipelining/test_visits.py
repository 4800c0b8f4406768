"""Visits to clusters are dealt to cores, each to one, in about equal work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("faiss")

from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.running import Visits
from ragorder.pipelining.search.scanner import shares_of


def visits(rows: list[int], codes: list[int]) -> Visits:
    numbers = np.arange(len(rows))
    return Visits(np.array(rows, np.intp), numbers, numbers.astype(np.float32), np.array(codes, np.int64))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=60), st.integers(1, 9), st.booleans())
def test_each_visit_is_dealt_once_in_order_of_rows(pairs: list[tuple[int, int]], shares: int, one_row: bool) -> None:
    rows = sorted(0 if one_row else row for row, _ in pairs)
    dealt = visits(rows, [codes for _, codes in pairs]).deal(shares)
    assert len(dealt) <= shares
    assert all(len(part.rows) for part in dealt)
    assert sorted(number for part in dealt for number in part.clusters.tolist()) == list(range(len(pairs)))
    for part in dealt:
        assert part.rows.tolist() == sorted(part.rows.tolist())
        assert part.codes.tolist() == [pairs[number][1] for number in part.clusters.tolist()]


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
