"""What a search recalls of those before it shows its results earlier, or ends it, and changes none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import L2, METRICS, D, advance, assert_same, build, params_of, tied, undriven
from support.ivf import clustered as vectors

from ragorder.pipelining.search import Budget, History
from ragorder.pipelining.search.request import PastSearch

N = 2000


@pytest.fixture(scope="module")
def queries() -> Any:
    return vectors(200, 1)


class TestHistory:
    @pytest.fixture
    def related(self, queries: Any) -> Any:
        """Pairs of a query and one near it."""
        rng = np.random.default_rng(5)
        return [(query, query + 0.05 * rng.standard_normal(D).astype(np.float32)) for query in queries[:60]]

    def test_what_it_recalls_stays_until_those_clusters_are_scanned(self, flat: Any, queries: Any) -> None:
        """Searched again, each stage shows the final results, in whatever order the clusters come."""
        search = undriven(flat, 6)
        for query in queries[:20]:
            history = History()
            final = search.submit(query, 5, history=history).result()
            stages = list(search.submit(query, 5, history=history).stages())
            assert [stage.ids.tolist() for stage in stages] == [final.ids.tolist()] * len(stages)
            assert [stage.number for stage in stages] == [1, 2, 3, 4, 5, 6]

    def test_what_it_recalls_of_clusters_that_are_not_searched_is_left_out(self, flat: Any, queries: Any) -> None:
        search = undriven(flat)
        for query in queries[:20]:
            history = History()
            search.submit(query, 5, history=history, params=params_of(8)).result()
            stages = list(search.submit(query, 5, history=history, params=params_of(1)).stages())
            assert all(stage.ids.tolist() == stages[-1].ids.tolist() for stage in stages)

    @pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
    @pytest.mark.parametrize("whole", [True, False])
    def test_leaves_equals_of_several_clusters_in_the_order_of_their_ids(self, metric: int, whole: bool) -> None:
        index = build("IVF24,Flat", metric, tied(N, 0), ids=np.random.default_rng(1).permutation(N))
        search = undriven(index, 24)
        for query in tied(30, 3):
            found = search.submit(query, 20, history=History(), whole=whole).result()
            assert_same(found, index.search(query[None], 20, params=params_of(24)))

    def test_lets_similar_searches_find_their_results_earlier(self, flat: Any, related: Any) -> None:
        search = undriven(flat, 24)
        numbers = {False: 0, True: 0}
        for first, second in related[:30]:
            for known in numbers:
                history = History()
                if known:
                    search.submit(first, 5, history=history).result()
                stages = [stage for stage in search.submit(second, 5, history=history).stages() if stage.number]
                right = [(stage.ids == stages[-1].ids).all() for stage in stages]
                numbers[known] += right.index(True)
        assert numbers[True] < numbers[False]

    def test_visits_clusters_with_results_first_then_those_scanned_then_others(self) -> None:
        past = PastSearch(
            query=np.zeros(2, np.float32),
            clusters=np.array([4, 7, 9]),
            keys=np.zeros(2, np.float32),
            ids=np.array([1, 2]),
            locations=np.array([7 << 32 | 5, 9 << 32]),
            vectors=None,
            reach=1.0,
            metric="L2",
        )
        clusters = np.array([1, 4, 9, 2, 7])
        assert clusters[past.order(clusters)].tolist() == [9, 7, 4, 1, 2]

    @pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
    def test_gives_provisional_results_before_the_first_cluster(self, metric: int, related: Any) -> None:
        index, stages = build("IVF24,Flat", metric), []
        search = undriven(index, 12, clock=lambda: 0.0)
        for first, second in related:
            history = History()
            kept = search.submit(first, 20, history=history).result().ids[0].tolist()
            # An older search has the first pieces.
            search.submit(first, 5)
            handle = search.submit(second, 3, history=history)
            advance(search, 2)
            if handle.stage is not None:
                stages.append(handle.stage)
                assert set(handle.stage.ids[0].tolist()) <= set(kept)
                exact = index.search(second[None], 3, params=params_of(24))
                if (handle.stage.ids == exact[1]).all():
                    np.testing.assert_allclose(handle.stage.distances, exact[0], rtol=1e-4, atol=1e-6)
        assert len(stages) > 30
        assert {(stage.number, stage.final) for stage in stages} == {(0, False)}

    def test_counts_only_if_the_queries_are_as_near_as_the_results(self, flat: Any, queries: Any) -> None:
        history = History()
        undriven(flat, 12).submit(queries[0], 5, history=history).result()
        assert history.similar(queries[0]) is not None
        assert history.similar(-queries[0]) is None

    def test_keeps_the_last_searches_only(self, flat: Any, queries: Any) -> None:
        search, history = undriven(flat, 12), History(kept=7, searches=2)
        for query in queries[:5]:
            search.submit(query, 5, history=history).result()
        assert len(history) == 2 and history.similar(queries[0]) is None
        past = history.similar(queries[4])
        assert past is not None and len(past.ids) == len(past.locations) == 7
        assert past.ids.tolist() == flat.search(queries[4:5], 7, params=params_of(12))[1][0].tolist()

    def test_has_what_a_search_ahead_of_need_found_before_it_was_cancelled(self, flat: Any, queries: Any) -> None:
        search, history = undriven(flat, 12), History()
        handle = search.submit(queries[0], 5, history=history, due=False)
        advance(search, 3)
        handle.cancel()
        assert not search.advance()
        past = history.similar(queries[0])
        assert past is not None and len(past.clusters) == 3


class TestPatience:
    def test_ends_a_search_when_nothing_changes(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        search = undriven(flat, 24, patience=4)
        stages = [search.submit(query, 5).result() for query in queries]
        assert scanned() < 0.5 * 24 * len(queries)
        assert all(stage.final for stage in stages)
        assert {stage.number % 4 for stage in stages} == {0}
        assert all(stage.settled >= 4 for stage in stages if stage.number < 24)
        exact = flat.search(queries, 5, params=params_of(24))[1]
        recall = np.mean([np.isin(stage.ids[0], ids).mean() for stage, ids in zip(stages, exact, strict=True)])
        assert 0.9 < recall < 1

    def test_finds_the_same_in_every_interleaving(self, flat: Any, queries: Any) -> None:
        found = []
        for cores, overhead_s, together in ((1, 1e-12, 1), (2, 1e-6, 50), (3, 1.0, 200)):
            search, handles = undriven(flat, 24, cores, patience=5, budget=Budget(overhead_s)), []
            for start in range(0, len(queries), together):
                handles += [search.submit(query, 5) for query in queries[start : start + together]]
                search.advance()
            found.append([(handle.result().number, handle.result().ids.tolist()) for handle in handles])
        assert found[0] == found[1] == found[2]

    def test_never_ends_with_fewer_than_k_results(self) -> None:
        search = undriven(build("IVF24,Flat", L2, vectors(60, 0)), 24, patience=1)
        assert (search.submit(vectors(1, 1)[0], 40).result().ids != -1).all()
