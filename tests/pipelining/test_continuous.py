"""Searches that share their time find what each of them finds alone, whatever joins and leaves meanwhile."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import NEXT_PIECE, cluster_index
from support.rings import examples, grid, length

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import (
    FLAVOURS,
    IP,
    L2,
    METRICS,
    SMALL_PIECES,
    AsFaiss,
    D,
    advance,
    advance_all,
    assert_same,
    build,
    last,
    params_of,
    tied,
    tied_index,
    undriven,
)
from support.ivf import clustered as vectors

from ragorder.pipelining import ContinuousIVF, Stage, staged_retrieval
from ragorder.pipelining.search import Budget, History, SearchHandle
from ragorder.pipelining.search.continuous import fill
from ragorder.pipelining.search.costs import PieceLimit
from ragorder.pipelining.search.request import SearchRequest
from ragorder.pipelining.search.running import RunningSearch

CLUSTERS = cluster_index()
N = 2000


@pytest.fixture(scope="module")
def queries() -> Any:
    return vectors(200, 1)


class TestTheLastStageIsTheSearch(AsFaiss):
    def found(self, index: Any, queries: Any, k: int, folder: Path, chance: Random) -> Stage:
        budget = Budget(chance.choice([SMALL_PIECES, 1e-7, 1e-3]))
        return last(undriven(index, cores=chance.randint(1, 3), budget=budget).search(queries, k))

    def check(self, index: Any, queries: Any, k: int, folder: Path, seed: int = 0) -> None:
        if k <= index.ntotal:
            super().check(index, queries, k, folder, seed)
        else:
            with pytest.raises(ValueError, match=f"k={k}, but the index has {index.ntotal} vectors: give a smaller k"):
                self.found(index, queries, k, folder, Random(seed))

    @pytest.mark.parametrize(
        ("data", "description", "metric"),
        grid([*itertools.product([vectors, tied], FLAVOURS, METRICS.values())], 9),
    )
    def test_of_64_that_join_and_leave_in_every_kind_of_index(self, data: Any, description: str, metric: int) -> None:
        chance, index, queries = Random(0), build(description, metric, data(600, 0), nprobe=7), data(160, 1)
        search = undriven(index, cores=2)
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
                history, due, whole = histories[int(rng.integers(3))], bool(rng.integers(2)), rng.integers(4) == 0
                handles.append((search.submit(query, k, history=history, due=due, whole=bool(whole)), query, k))
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

    def test_of_wrapped_indexes_with_the_callers_ids(self, queries: Any) -> None:
        ids = np.arange(N)[::-1] * 7 + 10**12
        index = build("IDMap2,PCA8,IVF24,Flat", IP, vectors(N, 0), ids=ids, nprobe=9)
        search, history = undriven(index), History()
        for row in range(20):
            stages = list(search.submit(queries[row], 5, history=history).stages())
            assert all((stage.ids >= 10**12).all() for stage in stages[-3:])
            assert_same(stages[-1], index.search(queries[row : row + 1], 5))

    def test_after_more_was_added(self, queries: Any) -> None:
        index = build("IVF24,Flat")
        search = undriven(index, 24)
        search.submit(queries[0], 3).result()
        index.add(queries)
        assert search.submit(queries[0], 1).result().distances == 0

    def test_of_queries_whose_array_is_used_again(self, flat: Any, queries: Any) -> None:
        search, array, handles = undriven(flat, 9), np.empty(D, np.float32), []
        for query in queries[:8]:
            array[:] = query
            handles.append(search.submit(array, 5))
        expected = flat.search(queries[:8], 5, params=params_of(9))
        for row, handle in enumerate(handles):
            assert_same(handle.result(), expected, row)


class TestSearchParameters:
    """Of FAISS: an nprobe and a selector for each search."""

    @pytest.mark.parametrize(
        ("description", "data"),
        grid([*itertools.product(["PCA8,IVF24,Flat", "IVF24,PQ4x4", "IDMap2,IVF24,Flat"], [vectors, tied])], 3),
    )
    def test_of_many_tenants_at_once(self, description: str, data: Any) -> None:
        stored, queries = data(600, 0), data(64, 1)
        ids = np.random.default_rng(0).permutation(600) if description.startswith("IDMap2") else None
        index = build(description, L2, stored, ids=ids)
        search = undriven(index, 9, 2)
        tenants = [None, faiss.IDSelectorRange(100, 130), faiss.IDSelectorBatch(list(range(0, 600, 7)))] * 21
        selectors = [*tenants, faiss.IDSelectorRange(700, 800)]
        asked = [params_of(1 + number % 24, sel=selector) for number, selector in enumerate(selectors)]
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

    @pytest.mark.parametrize("cores", [1, 3])
    def test_of_searches_with_several_queries(self, cores: int, flat: Any, queries: Any) -> None:
        search, chosen = undriven(flat, 9, cores), params_of(5, sel=faiss.IDSelectorRange(0, 900, True))
        for params, searched in ((None, params_of(9)), (chosen, chosen)):
            other = search.submit(queries[0], 5)
            *_, found = search.search(queries, 7, params=params)
            assert_same(found, flat.search(queries, 7, params=searched))
            assert other.done

    async def test_in_an_event_loop(self, flat: Any, queries: Any) -> None:
        params = params_of(5, sel=faiss.IDSelectorBatch([1, 2, 3]))
        with ContinuousIVF(flat, budget=Budget(SMALL_PIECES)) as search:
            async for stage in search.search_async(queries[:1], 3, params=params):
                assert set(stage.ids[0].tolist()) <= {-1, 1, 2, 3}
        assert_same(stage, flat.search(queries[:1], 3, params=params))


class TestStages:
    def test_say_their_number_whether_final_and_how_long_nothing_changed(self, flat: Any, queries: Any) -> None:
        found, settled, before = list(undriven(flat, 20).search(queries[:1], 5)), 0, None
        numbers = [(stage.number, stage.stages, stage.final) for stage in found]
        assert numbers == [(number, 20, number == 20) for number in range(1, 21)]
        for stage in found:
            assert_same(stage, flat.search(queries[:1], 5, params=params_of(stage.number)))
            settled = settled + 1 if before is not None and (stage.ids == before).all() else 0
            assert stage.settled == settled
            before = stage.ids
            with pytest.raises(ValueError, match="read-only"):
                stage.ids[0, 0] = 7
        assert settled > 5

    def test_that_nobody_takes_in_time_are_skipped_but_never_the_final_one(self, flat: Any, queries: Any) -> None:
        search = undriven(flat, 9)
        handle = search.submit(queries[0], 5)
        advance(search, 4)
        stages = handle.stages()
        assert next(stages).number == 4
        advance_all(search)
        assert [stage.number for stage in stages] == [9]
        # Again after the end.
        assert handle.result().ids.tolist() == next(handle.stages()).ids.tolist()

    async def test_reach_an_event_loop_without_a_thread_that_waits(self, flat: Any, queries: Any) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        expected = flat.search(queries, 5, params=params_of(12))[1]
        with ContinuousIVF(flat, nprobe=12, cores=1, budget=Budget(1e-6)) as search:
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
        search = undriven(flat, 9)
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
        search = undriven(flat, 9)
        first, second = (search.submit(query, 5) for query in queries[:2])
        advance(search, 9)
        assert first.done and not second.done
        assert advance_all(search) == 9

    def test_is_of_searches_that_are_due_before_the_others(self, flat: Any, queries: Any) -> None:
        search = undriven(flat, 9)
        ahead = search.submit(queries[0], 5, due=False)
        search.advance()
        due = search.submit(queries[1], 5)
        advance(search, 9)
        assert due.done and not ahead.done
        other = search.submit(queries[1], 5)
        ahead.promote()
        advance(search, 8)
        assert ahead.done and not other.done

    def test_is_of_the_shortest_search_if_so_ordered(self, queries: Any) -> None:
        search = undriven(build(), order="shortest", clock=lambda: 0.0)
        long = search.submit(queries[0], 5, params=params_of(24))
        search.advance()
        short = search.submit(queries[1], 5, params=params_of(3))
        advance(search, 3)
        assert short.done and not long.done

    def test_is_not_put_off_for_ever_by_shorter_searches(self, flat: Any, queries: Any) -> None:
        now = itertools.count()
        search = undriven(flat, order="shortest", clock=lambda: float(next(now)))
        handle = search.submit(queries[0], 5, params=params_of(24))
        for query in itertools.cycle(queries):
            search.advance()
            if handle.done:
                break
            assert search.pieces < 1000
            search.submit(query, 5, params=params_of(1))

    def test_is_whole_where_cutting_gains_nothing(self, flat: Any, queries: Any) -> None:
        search = undriven(flat, 24, budget=Budget(1.0))
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

    def test_of_one_search_is_dealt_to_cores(self, flat: Any, queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        search, calls, scan = undriven(flat, 24, 3, budget=Budget(1e9)), [], CLUSTERS.scan
        search.costs.code_s = 1.0

        def seen(self: Any, rows: Any, k: int, clusters: Any, *rest: Any, **options: Any) -> Any:
            calls.append((clusters >= 0).sum())
            return scan(self, rows, k, clusters, *rest, **options)

        monkeypatch.setattr(CLUSTERS, "scan", seen)
        assert_same(search.submit(queries[0], 5).result(), flat.search(queries[:1], 5, params=params_of(24)))
        assert len(calls) == 3 and sum(calls) == 24

    def test_scans_each_cluster_of_each_search_once(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        search = undriven(flat, 12, 2, budget=Budget(1e-7))
        handles = [search.submit(query, 5) for query in queries]
        advance_all(search)
        assert all(handle.done for handle in handles)
        assert scanned() == 12 * len(queries)

    def test_leaves_the_index_as_it_was(self, queries: Any) -> None:
        index = build(nprobe=3)
        undriven(index, 20).submit(queries[0], 5).result()
        assert (index.nprobe, index.parallel_mode, faiss.omp_get_max_threads()) == (3, 0, 1)


class TestSearchesThatEndEarly:
    def test_by_cancellation_scan_nothing_more(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        search = undriven(flat, 9)
        handle, other = search.submit(queries[0], 5), search.submit(queries[1], 5)
        search.advance()
        assert handle.cancel() and not handle.cancel() and handle.cancelled
        with pytest.raises(CancelledError):
            next(handle.stages())
        advance_all(search)
        assert scanned() == 1 + 9
        assert other.done and not other.cancel() and other.result().final

    def test_while_another_thread_waits_for_them(self) -> None:
        handle = SearchHandle(None)
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.001 s"):
            handle.result(0.001)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handle.result)
            handle.cancel()
            with pytest.raises(CancelledError):
                waiting.result(10)

    def test_by_an_error_do_not_end_the_others(self, flat: Any, queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        scan, bad = CLUSTERS.scan, queries[3]

        def failing(self: Any, rows: Any, *rest: Any, **options: Any) -> Any:
            if (rows == bad).all(axis=1).any():
                raise RuntimeError("a broken cluster")
            return scan(self, rows, *rest, **options)

        monkeypatch.setattr(CLUSTERS, "scan", failing)
        search = undriven(flat, 9, 2, budget=Budget(1e9))
        search.costs.code_s = 1.0
        handles = [search.submit(query, 5) for query in queries[:8]]
        advance_all(search)
        with pytest.raises(RuntimeError, match="a broken cluster"):
            handles.pop(3).result()
        for query, handle in zip(np.delete(queries[:8], 3, 0), handles, strict=True):
            assert_same(handle.result(), flat.search(query[None], 5, params=params_of(9)))

    def test_by_a_listener_that_raises_do_not_end_the_others(self, flat: Any, queries: Any) -> None:
        search = undriven(flat, 9)
        handles = [search.submit(query, 5) for query in queries[:3]]

        def fail() -> None:
            raise LookupError

        handles[1].subscribe(fail)
        for row, handle in enumerate(handles):
            assert_same(handle.result(), flat.search(queries[row : row + 1], 5, params=params_of(9)))

    def test_by_errors_anywhere_all_end_exactly_once(
        self, flat: Any, queries: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Failures of the quantizer, of scans, of decoding and of the piece itself, and cancellations."""
        chance = Random(0)

        def sometimes(method: Any) -> Any:
            def fail(*arguments: Any, **options: Any) -> Any:
                if chance.random() < 0.02:
                    raise RuntimeError("injected")
                return method(*arguments, **options)

            return fail

        for name in ("scan", "nearest_clusters", "vectors", "ids_at"):
            monkeypatch.setattr(CLUSTERS, name, sometimes(getattr(CLUSTERS, name)))
        monkeypatch.setattr(ContinuousIVF, NEXT_PIECE, sometimes(getattr(ContinuousIVF, NEXT_PIECE)))
        expected = flat.search(queries, 5, params=params_of(9))
        answers: list[str] = []
        with ContinuousIVF(flat, nprobe=9, cores=2, budget=Budget(1e-7)) as search:

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
        search = undriven(flat, 9)
        handle = search.submit(queries[0], 5)
        search.close()
        search.close()
        with pytest.raises(CancelledError):
            handle.result()
        with pytest.raises(RuntimeError, match="this search is closed"):
            search.submit(queries[0], 5)

    def test_leave_no_thread_and_no_search_behind(self, flat: Any, queries: Any) -> None:
        others = set(threading.enumerate())
        search = ContinuousIVF(flat, nprobe=9, cores=2)
        handle = search.submit(queries[0], 5)
        handle.result(60)
        ended, gone = weakref.ref(handle), weakref.ref(search)
        threads = set(threading.enumerate()) - others
        assert threads
        del handle, search
        for thread in threads:
            gc.collect()
            thread.join(60)
            assert not thread.is_alive()
        gc.collect()
        assert ended() is None and gone() is None


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "options", "says"),
        [
            (lambda **_: ContinuousIVF(faiss.index_factory(D, "Flat")), {}, "ContinuousIVF cannot search IndexFlat"),
            (lambda **_: ContinuousIVF(faiss.index_factory(D, "IVF8,Flat")), {}, "is not trained: train it"),
            (undriven, {"nprobe": 0}, "nprobe must be at least 1, got 0"),
            (undriven, {"cores": 0}, "cores must be at least 1, got 0"),
            (undriven, {"order": "newest"}, "order must be 'oldest' or 'shortest', got 'newest'"),
            (undriven, {"patience": 0}, "patience must be at least 1 cluster, or None, got 0"),
            *((Budget, {"overhead_s": wrong}, "must be positive seconds") for wrong in (0.0, math.inf, math.nan)),
            (History, {"kept": 0}, "keeps at least one result of one search"),
            (History, {"searches": 0}, "keeps at least one result of one search"),
        ],
    )
    def test_settings_are_refused(self, make: Any, options: dict[str, Any], says: str, flat: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=says):
            make(**options | ({"index": flat} if make is undriven else {}))

    @pytest.mark.parametrize(
        ("query", "k", "params", "says"),
        [
            (np.zeros((1, D + 1)), 5, {}, r"queries must have the shape \(n, 16\), got \(1, 17\)"),
            (np.zeros((1, 1, D)), 5, {}, r"queries must have the shape"),
            (np.zeros((1, D)), 0, {}, "k must be at least 1, got 0"),
            (np.zeros((1, D)), 5, {"nprobe": 0}, "nprobe must be at least 1, got 0"),
            (np.zeros((1, D)), 5, {"nprobe": 3, "max_codes": 10}, "max_codes=10, a limit across stages"),
            (np.zeros((1, D)), 5, {"quantizer_params": faiss.SearchParametersIVF()}, "set the quantizer itself"),
            (np.zeros((1, D)), 5, faiss.SearchParameters(), "must be faiss.SearchParametersIVF"),
            (np.zeros((1, D)), 5, "nprobe=3", "must be faiss.SearchParametersIVF.*got str"),
        ],
    )
    def test_bad_queries_are_refused_before_the_search(
        self, query: Any, k: int, params: Any, says: str, flat: Any
    ) -> None:
        given = faiss.SearchParametersIVF(**params) if isinstance(params, dict) else params
        search = undriven(flat)
        for ask in (search.submit, search.search, search.search_async):
            with pytest.raises((TypeError, ValueError), match=says):
                ask(query, k, params=given)

    def test_submit_takes_one_query_and_no_history_with_a_selector(self, flat: Any) -> None:
        with pytest.raises(ValueError, match="submit takes one query, got 2: use search"):
            undriven(flat).submit(np.zeros((2, D)), 5)
        params = params_of(1, sel=faiss.IDSelectorRange(0, 9))
        with pytest.raises(ValueError, match="a search with a selector has no history"):
            undriven(flat).submit(np.zeros(D), 5, params=params, history=History())

    def test_bad_settings_of_the_index_that_come_later_are_refused(self, queries: Any) -> None:
        for setting, value, says in (
            ("nprobe", 0, "the index has nprobe 0: set it to at least 1"),
            ("max_codes", 100, "a limit across stages: set it to 0"),
        ):
            index = build()
            search = undriven(index)
            setattr(index, setting, value)
            with pytest.raises(ValueError, match=says):
                search.submit(queries[0], 5)
