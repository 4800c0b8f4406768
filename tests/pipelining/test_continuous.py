"""Searches that share their time find what each of them finds alone, whatever joins and leaves meanwhile."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples, grid, length

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import FLAVOURS, IP, L2, METRICS, D, assert_same, build, tied, tied_index
from support.ivf import clustered as vectors

from ragorder.pipelining import ContinuousIVF, staged_retrieval
from ragorder.pipelining.search import Budget, History, SearchHandle
from ragorder.pipelining.search.continuous import fill
from ragorder.pipelining.search.costs import ClusterCosts, PieceLimit
from ragorder.pipelining.search.request import PastSearch, SearchRequest
from ragorder.pipelining.search.running import RunningSearch
from ragorder.pipelining.staged._ivf import ClusterIndex

N = 2000
SMALL_PIECES = 1e-12
"""An overhead of a piece, in seconds, at which every piece is one cluster."""


def pieces(overhead_s: float = SMALL_PIECES) -> Budget:
    return Budget(overhead_s)


def advance_all(search: ContinuousIVF) -> int:
    """How many pieces were left."""
    return sum(1 for _ in iter(search.advance, False))


@pytest.fixture(scope="module")
def flat() -> Any:
    return build("IVF24,Flat")


@pytest.fixture(scope="module")
def queries() -> Any:
    return vectors(200, 1)


@pytest.fixture
def scanned() -> Callable[[], int]:
    """How many clusters FAISS has scanned."""
    faiss.cvar.indexIVF_stats.reset()
    return lambda: int(faiss.cvar.indexIVF_stats.nlist)


class TestTheResultIsThatOfFaiss:
    """Ids and distances, bit for bit."""

    @pytest.mark.parametrize(
        ("data", "description", "metric"),
        grid([*itertools.product([vectors, tied], FLAVOURS, METRICS.values())], 9),
    )
    def test_of_64_searches_at_once_in_every_kind_of_index(self, data: Any, description: str, metric: int) -> None:
        index, queries = build(description, metric, data(600, 0)), data(64, 1)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", 11)
        search = ContinuousIVF(index, cores=2, budget=pieces(), thread=False)
        handles = [search.submit(query, 1 + number % 9) for number, query in enumerate(queries)]
        advance_all(search)
        for number, handle in enumerate(handles):
            assert_same(handle.result(), index.search(queries[number : number + 1], 1 + number % 9))

    @pytest.mark.parametrize(("description", "metric"), grid([*itertools.product(FLAVOURS, METRICS.values())], 4))
    def test_of_64_at_a_time_that_join_and_leave_in_every_kind_of_index(self, description: str, metric: int) -> None:
        chance, index, queries = random.Random(0), build(description, metric, tied(600, 0)), tied(160, 1)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", 7)
        search = ContinuousIVF(index, cores=2, budget=pieces(), thread=False)
        histories = [None, *(History() for _ in range(4))]
        handles: list[SearchHandle] = []
        cancelled: set[SearchHandle] = set()
        most = 0
        for number, query in enumerate(queries):
            due, history = chance.random() < 0.8, chance.choice(histories)
            handles.append(search.submit(query, 1 + number % 9, history=history, due=due))
            most = max(most, search.in_flight)
            while search.in_flight >= 64:
                search.advance()
                chance.choice(handles).promote()
                if chance.random() < 0.3 and (leaves := chance.choice(handles)).cancel():
                    cancelled.add(leaves)
        advance_all(search)
        assert most == 64 and cancelled
        for number, handle in enumerate(handles):
            if handle in cancelled:
                assert handle.cancelled
            else:
                assert_same(handle.result(), index.search(queries[number : number + 1], 1 + number % 9))

    @settings(max_examples=examples(400))
    @given(
        data=st.data(),
        metric=st.sampled_from([L2, IP]),
        levels=st.integers(2, 300),
        stored=st.integers(30, 120),
        nlist=st.integers(1, 12),
        cores=st.integers(1, 3),
        order=st.sampled_from(["oldest", "shortest"]),
        overhead_s=st.sampled_from([1e-12, 1e-8, 1e-6, 1e-3]),
        crowd=st.sampled_from([0, 0, 0, 64]),
        seed=st.integers(0, 2**16),
    )
    def test_whoever_joins_and_leaves_between_two_pieces(
        self,
        data: st.DataObject,
        metric: int,
        levels: int,
        stored: int,
        nlist: int,
        cores: int,
        order: Any,
        overhead_s: float,
        crowd: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        index = tied_index(rng, metric, levels, stored, nlist)
        index.nprobe = data.draw(st.integers(1, nlist + 3), "nprobe")
        search = ContinuousIVF(index, cores=cores, order=order, budget=Budget(overhead_s), thread=False)
        histories = [History(kept=4), History(), None]
        handles: list[tuple[SearchHandle, Any, int]] = []
        cancelled: set[SearchHandle] = set()
        steps = data.draw(st.lists(st.sampled_from(["join", "join", "join", "advance", "leave", "promote"])))
        for step in ["join"] * crowd + steps:
            if step == "join":
                query = rng.integers(0, levels, (1, 3)).astype(np.float32)
                k = int(rng.integers(1, 30))
                history = histories[int(rng.integers(3))]
                handles.append((search.submit(query, k, history=history, due=bool(rng.integers(2))), query, k))
            elif step == "advance":
                search.advance()
            elif handles:
                handle = handles[int(rng.integers(len(handles)))][0]
                if step == "promote":
                    handle.promote()
                elif handle.cancel():
                    cancelled.add(handle)
        advance_all(search)
        assert search.in_flight == 0
        for handle, query, k in handles:
            if handle in cancelled:
                with pytest.raises(CancelledError):
                    handle.result()
            else:
                assert_same(handle.result(), index.search(query, k))

    @pytest.mark.parametrize("cores", [1, 3])
    def test_of_many_queries_in_one_search(self, cores: int, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=cores, budget=pieces(), thread=False)
        *_, found = search.search(queries, 7)
        assert_same(found, flat.search(queries, 7, params=faiss.SearchParametersIVF(nprobe=9)))

    def test_of_many_threads(self, flat: Any, queries: Any) -> None:
        expected = flat.search(queries, 5, params=faiss.SearchParametersIVF(nprobe=12))
        with ContinuousIVF(flat, nprobe=12, cores=2, budget=pieces(1e-6)) as search:
            with ThreadPoolExecutor(16) as pool:
                found = list(pool.map(lambda query: list(search.search(query[None], 5))[-1], queries))
            assert search.in_flight == 0
        for row, stage in enumerate(found):
            assert_same(stage, expected, row)

    def test_of_wrapped_indexes_with_the_callers_ids(self, queries: Any) -> None:
        index = faiss.IndexIDMap2(faiss.index_factory(D, "PCA8,IVF24,Flat", IP))
        index.train(vectors(N, 0))
        index.add_with_ids(vectors(N, 0), np.arange(N)[::-1] * 7 + 10**12)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", 9)
        search = ContinuousIVF(index, budget=pieces(), thread=False)
        history = History()
        for row in range(20):
            handle = search.submit(queries[row], 5, history=history)
            stages = list(handle.stages())
            assert all((stage.ids >= 10**12).all() for stage in stages[-3:])
            assert_same(stages[-1], index.search(queries[row : row + 1], 5))

    def test_after_more_was_added(self, queries: Any) -> None:
        index = build("IVF24,Flat")
        search = ContinuousIVF(index, nprobe=24, thread=False)
        search.submit(queries[0], 3).result()
        index.add(queries)
        assert search.submit(queries[0], 1).result().distances == 0

    def test_of_queries_whose_array_is_used_again(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, budget=pieces(), thread=False)
        array, handles = np.empty(D, np.float32), []
        for query in queries[:8]:
            array[:] = query
            handles.append(search.submit(array, 5))
        for row, handle in enumerate(handles):
            params = faiss.SearchParametersIVF(nprobe=9)
            assert_same(handle.result(), flat.search(queries[row : row + 1], 5, params=params))

    def test_of_no_query_at_all(self, flat: Any) -> None:
        *_, found = ContinuousIVF(flat, thread=False).search(np.empty((0, D), np.float32), 5)
        assert found.final
        assert found.ids.shape == (0, 5)

    def test_of_a_query_with_nan(self, flat: Any) -> None:
        query = np.full((1, D), np.nan, np.float32)
        assert_same(ContinuousIVF(flat, nprobe=9, thread=False).submit(query, 5).result(), flat.search(query, 5))


class TestSearchParameters:
    """Of FAISS: an nprobe and a selector for each search."""

    @pytest.mark.parametrize("data", [vectors, tied])
    @pytest.mark.parametrize("description", ["IVF24,Flat", "IVF24,PQ4x4", "IDMap2,IVF24,Flat", "PCA8,IVF24,Flat"])
    def test_of_many_tenants_at_once(self, description: str, data: Any) -> None:
        stored, queries = data(600, 0), data(64, 1)
        index = faiss.index_factory(D, description)
        index.train(stored)
        if description.startswith("IDMap2"):
            index.add_with_ids(stored, np.random.default_rng(0).permutation(600))
        else:
            index.add(stored)
        search = ContinuousIVF(index, nprobe=9, cores=2, budget=pieces(), thread=False)
        tenants = [None, faiss.IDSelectorRange(100, 130), faiss.IDSelectorBatch(list(range(0, 600, 7)))] * 21
        asked = [
            faiss.SearchParametersIVF(nprobe=1 + number % 24, sel=selector)
            for number, selector in enumerate([*tenants, faiss.IDSelectorRange(700, 800)])
        ]
        handles = [
            search.submit(query, 7, params=params, history=None if params.sel else History(), due=bool(number % 3))
            for number, (query, params) in enumerate(zip(queries, asked, strict=True))
        ]
        advance_all(search)
        for query, params, handle in zip(queries, asked, handles, strict=True):
            theirs = params
            if description.startswith("PCA"):
                theirs = faiss.SearchParametersPreTransform(index_params=params)
            assert_same(handle.result(), index.search(query[None], 7, params=theirs))
        assert (handles[-1].result().ids == -1).all()

    def test_of_searches_with_several_queries(self, flat: Any, queries: Any) -> None:
        params = faiss.SearchParametersIVF(nprobe=5, sel=faiss.IDSelectorRange(0, 900, True))
        search = ContinuousIVF(flat, cores=3, budget=pieces(), thread=False)
        other = search.submit(queries[0], 5)
        *_, found = search.search(queries, 7, params=params)
        assert_same(found, flat.search(queries, 7, params=params))
        assert other.done

    async def test_in_an_event_loop(self, flat: Any, queries: Any) -> None:
        params = faiss.SearchParametersIVF(nprobe=5, sel=faiss.IDSelectorBatch([1, 2, 3]))
        with ContinuousIVF(flat, budget=pieces()) as search:
            async for stage in search.search_async(queries[:1], 3, params=params):
                assert set(stage.ids[0].tolist()) <= {-1, 1, 2, 3}
        assert_same(stage, flat.search(queries[:1], 3, params=params))

    @pytest.mark.parametrize(
        ("params", "error", "says"),
        [
            ({"nprobe": 0}, ValueError, "nprobe must be at least 1, got 0"),
            ({"nprobe": 3, "max_codes": 10}, ValueError, "max_codes=10, a limit across stages"),
            ({"quantizer_params": faiss.SearchParametersIVF()}, ValueError, "set the quantizer itself"),
            (faiss.SearchParameters(), TypeError, "must be faiss.SearchParametersIVF"),
            ("nprobe=3", TypeError, "must be faiss.SearchParametersIVF.*got str"),
        ],
    )
    def test_that_have_no_answer_are_refused(self, params: Any, error: Any, says: str, flat: Any, queries: Any) -> None:
        given = faiss.SearchParametersIVF(**params) if isinstance(params, dict) else params
        search = ContinuousIVF(flat, thread=False)
        for ask in (search.submit, search.search, search.search_async):
            with pytest.raises(error, match=says):
                ask(queries[:1], 5, params=given)

    def test_with_a_selector_have_no_history(self, flat: Any, queries: Any) -> None:
        params = faiss.SearchParametersIVF(sel=faiss.IDSelectorRange(0, 9))
        with pytest.raises(ValueError, match="a search with a selector has no history"):
            ContinuousIVF(flat, thread=False).submit(queries[0], 5, params=params, history=History())


class TestStages:
    def test_are_numbered_by_clusters_and_only_the_last_is_final(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        found = list(search.search(queries[:1], 5))
        assert [stage.number for stage in found] == list(range(1, 10))
        assert {stage.stages for stage in found} == {9}
        assert [stage.final for stage in found] == [False] * 8 + [True]
        for stage in found:
            assert_same(stage, flat.search(queries[:1], 5, params=faiss.SearchParametersIVF(nprobe=stage.number)))
            with pytest.raises(ValueError, match="read-only"):
                stage.ids[0, 0] = 7

    def test_say_for_how_many_clusters_nothing_has_changed(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=20, cores=1, budget=pieces(), thread=False)
        settled, before = 0, None
        for stage in search.search(queries[:1], 5):
            settled = settled + 1 if before is not None and (stage.ids == before).all() else 0
            assert stage.settled == settled
            before = stage.ids
        assert settled > 5

    def test_that_nobody_takes_in_time_are_skipped_but_never_the_final_one(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        handle = search.submit(queries[0], 5)
        for _ in range(4):
            search.advance()
        stages = handle.stages()
        assert next(stages).number == 4
        advance_all(search)
        assert [stage.number for stage in stages] == [9]

    def test_may_be_taken_again_after_the_end(self, flat: Any, queries: Any) -> None:
        handle = ContinuousIVF(flat, nprobe=9, thread=False).submit(queries[0], 5)
        assert handle.result().ids.tolist() == handle.result().ids.tolist() == next(handle.stages()).ids.tolist()

    async def test_reach_an_event_loop_without_a_thread_that_waits(self, flat: Any, queries: Any) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        expected = flat.search(queries, 5, params=faiss.SearchParametersIVF(nprobe=12))[1]
        with ContinuousIVF(flat, nprobe=12, cores=1, budget=pieces(1e-6)) as search:
            # All take a first stage before any takes its second: more searches than threads.
            everyone = asyncio.Barrier(64)
            retrieval = staged_retrieval(search, lambda row: queries[row : row + 1], int, top_k=5)

            async def find(row: int) -> list[int]:
                await everyone.wait()
                async for found in retrieval(row):
                    documents = list(found.documents)
                assert found.final
                return documents

            assert await asyncio.gather(*map(find, range(64))) == expected[:64].tolist()

    async def test_of_an_abandoned_stream_are_not_scanned(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        stages = search.search_async(queries[:1], 5)
        assert (await anext(stages)).number == 1
        await stages.aclose()
        assert not search.advance()
        dropped = search.search(queries[:1], 5)
        next(dropped)
        del dropped
        assert not search.advance()


class TestAPiece:
    def test_is_of_the_oldest_search_until_there_is_work_enough(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        first, second = (search.submit(query, 5) for query in queries[:2])
        for _ in range(9):
            search.advance()
        assert first.done
        assert not second.done
        assert advance_all(search) == 9

    def test_is_of_searches_that_are_due_before_the_others(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        ahead = search.submit(queries[0], 5, due=False)
        search.advance()
        due = search.submit(queries[1], 5)
        for _ in range(9):
            search.advance()
        assert due.done
        assert not ahead.done
        other = search.submit(queries[1], 5)
        ahead.promote()
        for _ in range(8):
            search.advance()
        assert ahead.done
        assert not other.done

    def test_is_of_the_shortest_search_if_so_ordered(self, queries: Any) -> None:
        index = build("IVF24,Flat")
        search = ContinuousIVF(index, cores=1, order="shortest", budget=pieces(), thread=False, clock=lambda: 0.0)
        index.nprobe = 24
        long = search.submit(queries[0], 5)
        search.advance()
        index.nprobe = 3
        short = search.submit(queries[1], 5)
        for _ in range(3):
            search.advance()
        assert short.done
        assert not long.done

    def test_is_not_put_off_for_ever_by_shorter_searches(self, queries: Any) -> None:
        now, index = itertools.count(), build("IVF24,Flat")
        search = ContinuousIVF(
            index, cores=1, order="shortest", budget=pieces(), thread=False, clock=lambda: float(next(now))
        )
        index.nprobe = 24
        handle = search.submit(queries[0], 5)
        search.advance()
        index.nprobe = 1
        for query in itertools.cycle(queries):
            search.submit(query, 5)
            search.advance()
            if handle.done:
                break
            assert search.pieces < 1000

    def test_is_whole_where_cutting_gains_nothing(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=24, cores=1, budget=Budget(1.0), thread=False)
        assert [stage.number for stage in search.search(queries[:1], 5)] == [24]
        for query in queries[:10]:
            search.submit(query, 5)
        assert advance_all(search) == 1

    @pytest.mark.parametrize(("first", "taken"), [(10, 1), (8, 1), (4, 2)])
    def test_of_whole_searches_has_no_other_that_is_too_long_for_the_rest(self, first: int, taken: int) -> None:
        searches = [RunningSearch(SearchHandle(None), SearchRequest(np.zeros((1, D)), 1, 1, 1)) for _ in range(2)]
        for search, codes in zip(searches, (first, 10), strict=True):
            search.total, search.codes = 1, [0, codes]
        piece = fill(searches, PieceLimit(10.0, whole=True), cores=1, code_s=1.0, order="oldest", now_s=0.0)
        assert [search for search, _ in piece] == searches[:taken]

    def test_of_one_search_is_dealt_to_all_cores(self, queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        index = build("IVF24,Flat")
        search = ContinuousIVF(index, nprobe=24, cores=3, budget=Budget(1e9), thread=False)
        search.costs.code_s = 1.0
        calls = []
        scan = ClusterIndex.scan

        def seen(self: Any, rows: Any, k: int, clusters: Any, *rest: Any, **options: Any) -> Any:
            calls.append((clusters >= 0).sum())
            return scan(self, rows, k, clusters, *rest, **options)

        monkeypatch.setattr(ClusterIndex, "scan", seen)
        assert_same(search.submit(queries[0], 5).result(), index.search(queries[:1], 5, params=_all(24)))
        assert len(calls) == 3
        assert sum(calls) == 24

    def test_scans_each_cluster_of_each_search_once(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        search = ContinuousIVF(flat, nprobe=12, cores=2, budget=pieces(1e-7), thread=False)
        handles = [search.submit(query, 5) for query in queries]
        advance_all(search)
        assert all(handle.done for handle in handles)
        assert scanned() == 12 * len(queries)

    def test_leaves_the_index_as_it_was(self, flat: Any, queries: Any) -> None:
        flat.nprobe = 3
        ContinuousIVF(flat, nprobe=20, thread=False).submit(queries[0], 5).result()
        assert (flat.nprobe, flat.parallel_mode, faiss.omp_get_max_threads()) == (3, 0, 1)


def _all(nprobe: int) -> Any:
    return faiss.SearchParametersIVF(nprobe=nprobe)


class TestSearchesThatEndEarly:
    def test_by_cancellation_scan_nothing_more(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        handle, other = search.submit(queries[0], 5), search.submit(queries[1], 5)
        search.advance()
        assert handle.cancel()
        assert not handle.cancel()
        assert handle.cancelled
        with pytest.raises(CancelledError):
            next(handle.stages())
        advance_all(search)
        assert scanned() == 1 + 9
        assert other.done
        assert not other.cancel()
        assert other.result().final

    def test_while_another_thread_waits_for_them(self, flat: Any, queries: Any) -> None:
        handle = SearchHandle(None)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handle.result)
            handle.cancel()
            with pytest.raises(CancelledError):
                waiting.result(10)

    def test_by_an_error_of_faiss_do_not_end_the_others(
        self, flat: Any, queries: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scan = ClusterIndex.scan
        bad = queries[3]

        def failing(self: Any, rows: Any, *rest: Any, **options: Any) -> Any:
            if (rows == bad).all(axis=1).any():
                raise RuntimeError("a broken cluster")
            return scan(self, rows, *rest, **options)

        monkeypatch.setattr(ClusterIndex, "scan", failing)
        search = ContinuousIVF(flat, nprobe=9, cores=2, budget=Budget(1e9), thread=False)
        search.costs.code_s = 1.0
        handles = [search.submit(query, 5) for query in queries[:8]]
        advance_all(search)
        for row, handle in enumerate(handles):
            if row == 3:
                with pytest.raises(RuntimeError, match="a broken cluster"):
                    handle.result()
            else:
                assert_same(handle.result(), flat.search(queries[row : row + 1], 5, params=_all(9)))

    def test_by_a_listener_that_raises_do_not_end_the_others(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, cores=1, budget=pieces(), thread=False)
        handles = [search.submit(query, 5) for query in queries[:3]]

        def fail() -> None:
            raise LookupError

        handles[1].subscribe(fail)
        for row, handle in enumerate(handles):
            assert_same(handle.result(), flat.search(queries[row : row + 1], 5, params=_all(9)))

    def test_by_errors_anywhere_are_none_lost_and_none_answered_twice(
        self, flat: Any, queries: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Failures of the quantizer, of scans, of decoding and of the piece itself, and cancellations."""
        chance = random.Random(0)

        def sometimes(method: Any) -> Any:
            def fail(*arguments: Any, **options: Any) -> Any:
                if chance.random() < 0.02:
                    raise RuntimeError("injected")
                return method(*arguments, **options)

            return fail

        for name in ("scan", "nearest_clusters", "vectors", "ids_at"):
            monkeypatch.setattr(ClusterIndex, name, sometimes(getattr(ClusterIndex, name)))
        monkeypatch.setattr(ContinuousIVF, "_next_piece", sometimes(ContinuousIVF._next_piece))
        expected = flat.search(queries, 5, params=_all(9))
        answers: list[str] = []
        with ContinuousIVF(flat, nprobe=9, cores=2, budget=pieces(1e-7)) as search:

            def ask(number: int) -> None:
                row = number % len(queries)
                history = History() if number % 3 else None
                handle = search.submit(queries[row], 5, history=history, due=bool(number % 5))
                if number % 7 == 0:
                    handle.cancel()
                try:
                    assert_same(handle.result(60), expected, row)
                    answers.append("found")
                except (RuntimeError, CancelledError) as error:
                    answers.append(str(error))
                assert handle.done

            with ThreadPoolExecutor(16) as pool:
                list(pool.map(ask, range(length(10_000, 1000))))
            assert search.in_flight == 0
        assert len(answers) == length(10_000, 1000)
        assert {"found", "injected", "the search was cancelled"} == set(answers)

    def test_because_all_is_closed(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=9, budget=pieces(), thread=False)
        handle = search.submit(queries[0], 5)
        search.close()
        with pytest.raises(CancelledError):
            handle.result()
        with pytest.raises(RuntimeError, match="this search is closed"):
            search.submit(queries[0], 5)
        search.close()

    def test_leave_no_thread_and_no_search_behind(self, flat: Any, queries: Any) -> None:
        others = set(threading.enumerate())
        search = ContinuousIVF(flat, nprobe=9, cores=2)
        handle = search.submit(queries[0], 5)
        handle.result(60)
        ended = weakref.ref(handle)
        gone = weakref.ref(search)
        threads = set(threading.enumerate()) - others
        assert threads
        del handle, search
        for thread in threads:
            gc.collect()
            thread.join(60)
            assert not thread.is_alive()
        gc.collect()
        assert ended() is None and gone() is None

    def test_a_result_may_be_waited_for_with_a_limit(self) -> None:
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.001 s"):
            SearchHandle(None).result(0.001)


class TestHistory:
    @pytest.fixture
    def related(self, queries: Any) -> Any:
        """Pairs of a query and one near it."""
        rng = np.random.default_rng(5)
        return [(query, query + 0.05 * rng.standard_normal(D).astype(np.float32)) for query in queries[:60]]

    def test_what_it_recalls_stays_until_those_clusters_are_scanned(self, flat: Any, queries: Any) -> None:
        """Searched again, each stage shows the final results, in whatever order the clusters come."""
        with ContinuousIVF(flat, nprobe=6, cores=1, budget=pieces(), thread=False) as search:
            for query in queries[:20]:
                history = History()
                final = search.submit(query, 5, history=history).result()
                again = search.submit(query, 5, history=history)
                stages = list(again.stages())
                assert [stage.ids.tolist() for stage in stages] == [final.ids.tolist()] * len(stages)
                assert [stage.number for stage in stages] == [1, 2, 3, 4, 5, 6]

    def test_what_it_recalls_of_clusters_that_are_not_searched_is_left_out(self, flat: Any, queries: Any) -> None:
        with ContinuousIVF(flat, cores=1, budget=pieces(), thread=False) as search:
            for query in queries[:20]:
                history = History()
                search.submit(query, 5, history=history, params=faiss.SearchParametersIVF(nprobe=8)).result()
                params = faiss.SearchParametersIVF(nprobe=1)
                stages = list(search.submit(query, 5, history=history, params=params).stages())
                assert all(stage.ids.tolist() == stages[-1].ids.tolist() for stage in stages)

    @pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
    @pytest.mark.parametrize("whole", [True, False])
    def test_leaves_equals_of_several_clusters_in_the_order_of_their_ids(self, metric: int, whole: bool) -> None:
        stored, ids = tied(N, 0), np.random.default_rng(1).permutation(N)
        index = faiss.index_factory(D, "IVF24,Flat", metric)
        index.train(stored)
        index.add_with_ids(stored, ids)
        with ContinuousIVF(index, nprobe=24, cores=1, budget=pieces(), thread=False) as search:
            for query in tied(30, 3):
                found = search.submit(query, 20, history=History(), whole=whole).result()
                assert_same(found, index.search(query[None], 20, params=_all(24)))

    def test_changes_no_result(self, flat: Any, related: Any) -> None:
        search = ContinuousIVF(flat, nprobe=12, cores=1, budget=pieces(), thread=False)
        for pair in related:
            history = History()
            for query in pair:
                found = search.submit(query, 5, history=history).result()
                assert_same(found, flat.search(query[None], 5, params=_all(12)))
            assert len(history) == 2

    def test_lets_similar_searches_find_their_results_earlier(self, flat: Any, related: Any) -> None:
        search = ContinuousIVF(flat, nprobe=24, cores=1, budget=pieces(), thread=False)
        numbers: dict[bool, int] = {False: 0, True: 0}
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
        index = build("IVF24,Flat", metric)
        search = ContinuousIVF(index, nprobe=12, cores=1, budget=pieces(), thread=False, clock=lambda: 0.0)
        stages = []
        for first, second in related:
            history = History()
            kept = search.submit(first, 20, history=history).result().ids[0].tolist()
            # An older search has the first pieces.
            search.submit(first, 5)
            handle = search.submit(second, 3, history=history)
            search.advance()
            search.advance()
            if handle.stage is not None:
                stages.append(handle.stage)
                assert set(handle.stage.ids[0].tolist()) <= set(kept)
                exact = index.search(second[None], 3, params=_all(24))
                if (handle.stage.ids == exact[1]).all():
                    np.testing.assert_allclose(handle.stage.distances, exact[0], rtol=1e-4, atol=1e-6)
        assert len(stages) > 30
        assert {stage.number for stage in stages} == {0}
        assert not any(stage.final for stage in stages)

    def test_counts_only_if_the_queries_are_as_near_as_the_results(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=12, thread=False)
        history = History()
        search.submit(queries[0], 5, history=history).result()
        assert history.similar(queries[0]) is not None
        assert history.similar(-queries[0]) is None
        history.clear()
        assert history.similar(queries[0]) is None

    def test_keeps_the_last_searches_only(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=12, thread=False)
        history = History(kept=7, searches=2)
        for query in queries[:5]:
            search.submit(query, 5, history=history).result()
        assert len(history) == 2
        assert history.similar(queries[0]) is None
        past = history.similar(queries[4])
        assert past is not None
        assert len(past.ids) == len(past.locations) == 7
        assert past.ids.tolist() == flat.search(queries[4:5], 7, params=_all(12))[1][0].tolist()

    def test_has_what_a_search_ahead_of_need_found_before_it_was_cancelled(self, flat: Any, queries: Any) -> None:
        search = ContinuousIVF(flat, nprobe=12, cores=1, budget=pieces(), thread=False)
        history = History()
        handle = search.submit(queries[0], 5, history=history, due=False)
        for _ in range(3):
            search.advance()
        handle.cancel()
        assert not search.advance()
        past = history.similar(queries[0])
        assert past is not None
        assert len(past.clusters) == 3

    @pytest.mark.parametrize("options", [{"kept": 0}, {"searches": 0}])
    def test_of_nothing_is_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="keeps at least one result of one search"):
            History(**options)


class TestPatience:
    def test_ends_a_search_after_clusters_that_change_nothing(
        self, flat: Any, queries: Any, scanned: Callable[[], int]
    ) -> None:
        search = ContinuousIVF(flat, nprobe=24, cores=1, patience=4, budget=pieces(), thread=False)
        stages = [search.submit(query, 5).result() for query in queries]
        assert scanned() < 0.5 * 24 * len(queries)
        assert all(stage.final for stage in stages)
        assert {stage.number % 4 for stage in stages} == {0}
        assert all(stage.settled >= 4 for stage in stages if stage.number < 24)
        exact = flat.search(queries, 5, params=_all(24))[1]
        recall = np.mean([np.isin(stage.ids[0], ids).mean() for stage, ids in zip(stages, exact, strict=True)])
        assert 0.9 < recall < 1

    def test_finds_the_same_in_every_interleaving(self, flat: Any, queries: Any) -> None:
        found = []
        for cores, overhead_s, together in ((1, 1e-12, 1), (2, 1e-6, 50), (3, 1.0, 200)):
            search = ContinuousIVF(flat, nprobe=24, cores=cores, patience=5, budget=Budget(overhead_s), thread=False)
            handles = []
            for start in range(0, len(queries), together):
                handles += [search.submit(query, 5) for query in queries[start : start + together]]
                search.advance()
            found.append([(handle.result().number, handle.result().ids.tolist()) for handle in handles])
        assert found[0] == found[1] == found[2]

    def test_never_ends_with_fewer_than_k_results(self) -> None:
        few = build("IVF24,Flat", L2, vectors(60, 0))
        search = ContinuousIVF(few, nprobe=24, patience=1, budget=pieces(), thread=False)
        assert (search.submit(vectors(1, 1)[0], 40).result().ids != -1).all()


class TestBadInput:
    @pytest.mark.parametrize(
        ("description", "says"),
        [
            ("Flat", "ContinuousIVF cannot search IndexFlat in stages exactly"),
            ("HNSW16,Flat", "ContinuousIVF cannot search IndexHNSWFlat"),
            ("IVF8,PQ4x4fs", "without fast scan"),
        ],
    )
    def test_indexes_whose_parts_do_not_add_up_are_refused(self, description: str, says: str) -> None:
        with pytest.raises(TypeError, match=says):
            ContinuousIVF(faiss.index_factory(D, description))

    def test_an_untrained_index_is_refused(self) -> None:
        with pytest.raises(ValueError, match="IndexIVFFlat is not trained: train it"):
            ContinuousIVF(faiss.index_factory(D, "IVF8,Flat"))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"nprobe": 0}, "nprobe must be at least 1, got 0"),
            ({"cores": 0}, "cores must be at least 1, got 0"),
            ({"order": "newest"}, "order must be 'oldest' or 'shortest', got 'newest'"),
            ({"patience": 0}, "patience must be at least 1 cluster, or None, got 0"),
        ],
    )
    def test_so_are_settings(self, options: dict[str, Any], says: str, flat: Any) -> None:
        with pytest.raises(ValueError, match=says):
            ContinuousIVF(flat, **options)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
    def test_and_budgets(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="overhead_s must be positive seconds"):
            Budget(seconds)

    @pytest.mark.parametrize(
        ("query", "k", "says"),
        [
            (np.zeros(D + 1), 5, r"queries must have the shape \(n, 16\), got \(1, 17\)"),
            (np.zeros((2, D)), 5, "submit takes one query, got 2: use search"),
            (np.zeros((1, 1, D)), 5, r"queries must have the shape"),
            (np.zeros(D), 0, "k must be at least 1, got 0"),
            (np.zeros(D), N + 1, "k=2001, but the index has 2000 vectors"),
        ],
    )
    def test_and_queries_before_the_search(self, query: Any, k: int, says: str, flat: Any) -> None:
        with pytest.raises(ValueError, match=says):
            ContinuousIVF(flat, thread=False).submit(query, k)

    @pytest.mark.parametrize("method", ["search", "search_async"])
    def test_at_once(self, method: str, flat: Any) -> None:
        with pytest.raises(ValueError, match="k=2001, but the index has 2000 vectors"):
            getattr(ContinuousIVF(flat, thread=False), method)(np.zeros((1, D)), 2001)

    def test_a_setting_of_the_index_that_comes_later(self, queries: Any) -> None:
        index = build("IVF24,Flat")
        search = ContinuousIVF(index, thread=False)
        index.nprobe = 0
        with pytest.raises(ValueError, match="the index has nprobe 0: set it to at least 1"):
            search.submit(queries[0], 5)
        index.nprobe = 1
        index.max_codes = 100
        with pytest.raises(ValueError, match="a limit across stages: set it to 0"):
            search.submit(queries[0], 5)


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

    def test_grows_with_the_searches_that_wait_for_a_core(self) -> None:
        budget = Budget(1e-5)
        alone = budget.limit(40.0, 0, 4).seconds
        assert budget.limit(40.0, 8, 4).seconds == pytest.approx(3 * alone, rel=0.01)

    @pytest.mark.parametrize("search_s", [0.01, 0.06, 0.1, 1.0, 30.0])
    @pytest.mark.parametrize("waiting", [0, 1, 50])
    def test_spends_at_most_two_percent_on_pieces_of_searches_that_are_cut(self, search_s: float, waiting: int) -> None:
        limit = Budget(1e-3).limit(64 * search_s, waiting, 64)
        assert limit.whole or limit.seconds >= 0.05
        assert limit.seconds <= max(search_s, 0.05) or waiting

    @pytest.mark.parametrize(("overhead_s", "search_s", "waiting"), [(1e-3, 0.09, 0), (1e-3, 0.04, 1), (1e-4, 0.5, 99)])
    def test_leaves_searches_whole_where_pieces_gain_nothing(
        self, overhead_s: float, search_s: float, waiting: int
    ) -> None:
        limit = Budget(overhead_s).limit(search_s, waiting, 1)
        assert limit.whole
        assert limit.seconds >= search_s

    def test_has_clusters_enough_to_be_dealt_out_evenly_while_searches_wait(self) -> None:
        assert Budget(1e-5).limit(4.0, 1, 4, cluster_s=0.02).seconds == pytest.approx(1 / 3)
        assert Budget(1e-5).limit(4.0, 1, 4, cluster_s=0.1).whole
        assert Budget(1e-5).limit(4.0, 0, 4, cluster_s=0.1).seconds < 0.02
        assert Budget(1e-5).limit(4.0, 1, 1, cluster_s=0.1).seconds < 0.02

    def test_cuts_into_equal_pieces(self) -> None:
        assert Budget(1e-3).limit(0.16, 0, 1).seconds == pytest.approx(0.16 / 3)

    def test_counts_an_interrupted_piece_as_a_few(self) -> None:
        budget = Budget()
        for overhead_s in [1e-4] * 50 + [1.0]:
            budget.learn(overhead_s)
        assert budget.overhead_s < 2e-4

    def test_learns_the_overhead_unless_it_is_given(self) -> None:
        learnt, given = Budget(), Budget(1e-3)
        for budget in (learnt, given):
            for _ in range(50):
                budget.learn(4e-4)
        assert learnt.overhead_s == pytest.approx(4e-4)
        assert given.overhead_s == 1e-3


class TestCosts:
    def test_are_learnt_from_calls_of_several_sizes(self) -> None:
        costs, rng = ClusterCosts(1e-6), random.Random(0)
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

    def test_of_calls_of_one_size_are_right_at_that_size(self) -> None:
        for seconds in (1e-5, 1e-3, 1e-1):
            costs = ClusterCosts(1e-7)
            for _ in range(200):
                costs.learn(5000, seconds)
            assert costs.seconds(5000) == pytest.approx(seconds)
            assert costs.code_s > 0
            assert costs.call_s >= 0

    def test_hardly_change_by_one_interrupted_call(self) -> None:
        costs = ClusterCosts(1e-7)
        for _ in range(100):
            costs.learn(5000, 5e-4)
        costs.learn(5000, 10.0)
        assert costs.seconds(5000) < 6e-4

    def test_do_not_change_by_calls_that_scan_nothing(self) -> None:
        costs = ClusterCosts(1e-7)
        costs.learn(0, 1.0)
        assert costs.seconds(1000) == pytest.approx(5e-5 + 1e-4)


def test_the_package_brings_neither_numpy_nor_faiss(python: Any) -> None:
    code = "import sys, ragorder.pipelining; print({'numpy', 'faiss'} & set(sys.modules))"
    assert python("-c", code).stdout == "set()\n"
