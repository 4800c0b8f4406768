"""Measurements of searches: when they are final, what an earlier one says about them, and what their pieces cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.hedra import locality
from ragorder.benchmarks.hedra.locality import Locality
from ragorder.benchmarks.hedra.search_costs import SearchCosts, explained, scans
from ragorder.benchmarks.hedra.staging import final_shares
from ragorder.pipelining import Stage

D = 16


@pytest.fixture(scope="module")
def index() -> Any:
    return build_index(clustered(1000, D, clusters=40, seed=0), 0.25)


@pytest.fixture(scope="module")
def pairs() -> Any:
    first = clustered(40, D, clusters=40, seed=1)
    second = first + 0.05 * np.random.default_rng(0).standard_normal(first.shape).astype(np.float32)
    return first, second


def found(*rows: list[int]) -> Any:
    """One search for the best two: after each cluster."""
    return np.array([rows])


class TestASearchIsFinal:
    def test_after_the_last_cluster_that_changed_its_best(self) -> None:
        assert locality.final_at(found([1, 2], [1, 2], [1, 2])) == [1]
        assert locality.final_at(found([1, 2], [2, 1], [1, 2])) == [3]
        assert locality.final_at(found([9, 2], [1, 2], [1, 2])) == [2]

    def test_in_shares_of_its_clusters(self) -> None:
        line = Locality.record(suite="mine", policy="nearest", rows={"final_at": [1, 2, 5, 10]}, facts={"nprobe": 10})
        shares = [locality.final_share(line, share) for share in (0.05, 0.1, 0.25, 0.5, 1)]
        assert shares == [0, 25, 50, 75, 100]


class TestAnEarlyEnd:
    def test_is_after_a_run_of_clusters_that_change_nothing(self) -> None:
        changes = found([1, -1], [1, 2], [1, 2], [1, 2], [1, 3], [1, 3])
        assert locality.early_ends(changes, 2) == (2 / 6, 0.5)
        assert locality.early_ends(changes, 1) == (3 / 6, 0.5)
        assert locality.early_ends(changes, 3) == (0.0, 1.0)

    def test_is_never_before_all_are_found(self) -> None:
        assert locality.early_ends(found([1, -1], [1, -1], [1, -1], [1, 2]), 1) == (0.0, 1.0)

    def test_is_where_the_search_itself_ends(self, index: Any, pairs: Any) -> None:
        from ragorder.pipelining import ContinuousIVF

        trace = locality.trace(index, zip(*pairs, strict=True), 3, history=False)
        search = ContinuousIVF(index, patience=4, thread=False)
        ends = [search.submit(query, 3).result() for query in pairs[1]]
        scanned = sum(stage.number for stage in ends)
        saved, recall = locality.early_ends(trace, 4)
        assert scanned == round((1 - saved) * index.nprobe * len(ends))
        hits = [np.isin(stage.ids[0], row[-1]).mean() for stage, row in zip(ends, trace, strict=True)]
        assert recall == pytest.approx(np.mean(hits))


class TestATrace:
    def test_ends_with_the_results_of_faiss_in_either_order(self, index: Any, pairs: Any) -> None:
        expected = index.search(pairs[1], 3)[1]
        for history in (False, True):
            trace = locality.trace(index, zip(*pairs, strict=True), 3, history=history)
            assert trace.shape == (40, index.nprobe, 3)
            assert trace[:, -1].tolist() == expected.tolist()

    def test_of_all_searches_those_that_find_what_faiss_finds_are_counted(self, index: Any, pairs: Any) -> None:
        assert locality.as_faiss(index, list(zip(*pairs, strict=True)), 3) == 80

    def test_is_final_earlier_by_what_a_similar_search_has_found(self, index: Any, pairs: Any) -> None:
        ends = [
            np.mean(locality.final_at(locality.trace(index, zip(*pairs, strict=True), 3, history=history)))
            for history in (False, True)
        ]
        assert ends[1] < ends[0]


class TestObservations:
    def test_of_a_query_with_itself_all_hold(self, index: Any, pairs: Any) -> None:
        assert set(locality.observations(index, pairs[0], pairs[0], 2).values()) == {1.0}

    def test_of_opposite_queries_none_holds(self, index: Any, pairs: Any) -> None:
        shares = locality.observations(index, pairs[0], -pairs[0], 2)
        assert max(shares.values()) < 0.1


def test_work_in_the_clusters_used_most_grows_to_all_of_it(index: Any, pairs: Any) -> None:
    few = locality.skew(index, pairs[0][:1], [0.05, 0.25, 0.5, 1.0])
    assert few["0.05"] < few["0.25"] == few["0.5"] == few["1"] == 1
    many = locality.skew(index, pairs[0], [0.25])
    assert 0.25 < many["0.25"] < 1


def test_a_partial_text_has_the_first_words_of_its_passage() -> None:
    assert locality.partial_texts(["who?"], ["a b c d"], 0.5) == ["who? a b"]
    assert locality.partial_texts(["who?"], ["a b c d"], 0.01) == ["who? a"]


class Scripted:
    """A staged search whose stages are given."""

    def __init__(self, *stages: list[list[int]]) -> None:
        self.stages = stages

    def search(self, queries: Any, k: int) -> Iterator[Stage]:
        for number, ids in enumerate(self.stages, 1):
            yield Stage(number, len(self.stages), np.array(ids), np.zeros((len(ids), k), np.float32))


class TestAStageIsFinal:
    def test_for_the_questions_whose_best_no_longer_change(self) -> None:
        staged = Scripted([[1, 2], [3, 4], [5, 6]], [[1, 9], [3, 4], [7, 6]], [[1, 2], [3, 4], [5, 6]])
        found = final_shares(staged, np.zeros((3, 1), np.float32), depths=(1, 2))
        assert found == {1: [2 / 3, 2 / 3, 1], 2: [1 / 3, 1 / 3, 1]}

    def test_once_their_order_no_longer_changes(self) -> None:
        staged = Scripted([[1, 2]], [[2, 1]])
        assert final_shares(staged, np.zeros((1, 1), np.float32), depths=(2,)) == {2: [0, 1]}


class TestCosts:
    def test_calls_scan_one_cluster_up_to_a_quarter_and_are_predicted_from_those_before(self, index: Any) -> None:
        rows = scans(index, clustered(5, D, clusters=40, seed=1), 40)
        assert {len(column) for column in rows.values()} == {40}
        assert min(rows["codes"]) >= 0 and max(rows["codes"]) <= index.ntotal
        # Before the first call only a guess is known.
        assert rows["predicted_ms"][0] == pytest.approx(0.05 + 1e-4 * rows["codes"][0])
        assert min(rows["ms"]) > 0

    def test_what_is_explained_is_of_the_later_half(self) -> None:
        for predicted_ms, share in (([0, 0, 0, 2, 3, 4], 1.0), ([0, 0, 0, 3, 3, 3], 0.0)):
            rows = {"ms": [9, 9, 1, 2, 3, 4], "predicted_ms": predicted_ms}
            assert explained(SearchCosts.record(suite="mine", policy="scans", rows=rows)) == share
