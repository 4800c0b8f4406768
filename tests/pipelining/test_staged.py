"""A search in stages tells what it has found so far, and ends with exactly what the search without stages finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import DATA, EVERY_FLAVOUR, IP, L2, METRICS, AsFaiss, D, assert_same, build, clustered, last, tied

from ragorder.pipelining import Stage, StagedHNSW, StagedIVF, staged_retrieval

N = 2000
OTHER_METRICS = ("L1", "Linf", "BrayCurtis", "Canberra", "JensenShannon", "Jaccard")


@pytest.fixture(scope="module")
def hnsw() -> Any:
    return build("HNSW16,Flat")


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(1000, 1)


class TestTheLastStageIsTheSearch(AsFaiss):
    def found(self, index: Any, queries: Any, k: int, folder: Path, chance: Random) -> Stage:
        growth: Any = chance.choice(["equal", "geometric"])
        return last(StagedIVF(index, chance.randint(1, 8), growth=growth).search(queries, k))

    @pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
    @pytest.mark.parametrize("description", ["HNSW16,Flat", "HNSW16,SQ8", "HNSW16,PQ4x4"])
    def test_over_1000_random_queries_of_an_hnsw_index(self, description: str, metric: int, queries: Any) -> None:
        index = build(description, metric)
        index.hnsw.efSearch = 40
        assert_same(last(StagedHNSW(index).search(queries, 10)), index.search(queries, 10))

    @pytest.mark.parametrize("description", EVERY_FLAVOUR[-2:])
    def test_the_last_stage_is_exact_in_more_kinds(self, description: str, tmp_path: Path) -> None:
        for metric, data in itertools.product(METRICS.values(), DATA.values()):
            self.check(build(description, metric, data(600, 0), nprobe=11), data(40, 1), 7, tmp_path)

    @pytest.mark.parametrize("data", DATA)
    @pytest.mark.parametrize("metric", OTHER_METRICS)
    def test_the_last_stage_is_exact_in_every_metric(self, metric: str, data: str) -> None:
        kind = getattr(faiss, f"METRIC_{metric}")
        vectors, queries = (abs(DATA[data](count, seed)) + 1 for count, seed in ((600, 0), (40, 1)))
        index = faiss.IndexIVFFlat(faiss.IndexFlat(D, kind), D, 16, kind)
        index.train(vectors)
        index.add(vectors)
        index.nprobe = 9
        assert_same(last(StagedIVF(index, 3).search(queries, 7)), index.search(queries, 7))

    def test_the_last_stage_is_exact_for_any_index_settings(self, queries: Any) -> None:
        bits = build("IVF24,RaBitQ")
        bits.qb, bits.nprobe = 4, 12
        assert_same(last(StagedIVF(bits).search(queries[:50], 5)), bits.search(queries[:50], 5))
        codes = faiss.IndexIVFPQ(faiss.IndexFlatL2(D), D, 8, 4, 4)
        codes.train(clustered(N, 0))
        codes.add(clustered(N, 0))
        codes.polysemous_ht, codes.nprobe = 7, 8
        strict = codes.search(queries[:50], 5)
        assert_same(last(StagedIVF(codes).search(queries[:50], 5)), strict)
        codes.polysemous_ht = 0
        assert not np.array_equal(strict[1], codes.search(queries[:50], 5)[1])
        graph = build("HNSW16,Flat")
        graph.hnsw.check_relative_distance = graph.hnsw.search_bounded_queue = False
        assert_same(last(StagedHNSW(graph).search(queries[:50], 5)), graph.search(queries[:50], 5))


class TestStages:
    def test_stages_are_numbered_and_read_only_and_the_last_is_final(self, flat: Any, queries: Any) -> None:
        found = list(StagedIVF(flat, 3, nprobe=9).search(queries[:2], 5))
        numbers = [(stage.number, stage.stages, stage.final) for stage in found]
        assert numbers == [(1, 3, False), (2, 3, False), (3, 3, True)]
        assert {stage.ids.shape for stage in found} == {stage.distances.shape for stage in found} == {(2, 5)}
        assert {(stage.ids.dtype, stage.distances.dtype) for stage in found} == {(np.dtype("i8"), np.dtype("f4"))}
        for array in (found[0].ids, found[0].distances):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 7

    @pytest.mark.parametrize(
        ("growth", "scanned"),
        [("equal", [5, 10, 15, 20]), ("geometric", [2, 5, 10, 20]), ((1, 2, 17), [1, 3, 20])],
    )
    def test_of_ivf_are_of_the_nearest_clusters(self, growth: Any, scanned: list[int], flat: Any, queries: Any) -> None:
        staged = StagedIVF(flat, 4, growth=growth, nprobe=20)
        for stage, nprobe in zip(staged.search(queries, 5), scanned, strict=True):
            assert_same(stage, flat.search(queries, 5, params=faiss.SearchParametersIVF(nprobe=nprobe)))

    @pytest.mark.parametrize(
        ("options", "searched"),
        [
            ({}, [4, 16, 64]),
            ({"stages": 2}, [16, 64]),
            ({"ef_search": 1000, "stages": 4}, [15, 62, 250, 1000]),
            ({"schedule": (8, 9, 50)}, [8, 9, 50]),
            ({"schedule": (2, 3, 50)}, [4, 50]),
            ({"ef_search": 3}, [4]),
        ],
    )
    def test_of_hnsw_are_searches_with_growing_ef(
        self, options: dict[str, Any], searched: list[int], hnsw: Any, queries: Any
    ) -> None:
        hnsw.hnsw.efSearch = 64
        for stage, ef_search in zip(StagedHNSW(hnsw, **options).search(queries[:100], 4), searched, strict=True):
            assert_same(stage, hnsw.search(queries[:100], 4, params=faiss.SearchParametersHNSW(efSearch=ef_search)))

    @given(nlist=st.integers(1, 40), stages=st.integers(1, 12), nprobe=st.integers(1, 60), k=st.integers(1, 3))
    @settings(max_examples=examples(30))
    def test_are_as_many_as_asked_for_up_to_all_clusters(self, nlist: int, stages: int, nprobe: int, k: int) -> None:
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(2), 2, nlist)
        index.train(np.random.default_rng(0).random((40, 2), np.float32))
        for growth in ("equal", "geometric"):
            staged = StagedIVF(index, stages, growth=growth, nprobe=nprobe)
            assert len(list(staged.search(np.zeros((1, 2)), k))) == min(stages, nprobe, nlist)

    def test_counts_beyond_the_clusters_there_are_end_with_the_last_cluster(self, flat: Any, queries: Any) -> None:
        found = list(StagedIVF(flat, growth=(8, 8, 8, 8)).search(queries[:5], 5))
        assert len(found) == 3
        assert_same(found[-1], flat.search(queries[:5], 5, params=faiss.SearchParametersIVF(nprobe=24)))


class TestWorkIsDoneStageByStage:
    def test_no_stage_runs_before_its_next(self, flat: Any, queries: Any, scanned: Callable[[], int]) -> None:
        stages = StagedIVF(flat, 4, nprobe=20).search(queries[:1], 5)
        assert scanned() == 0
        for number in range(1, 4):
            next(stages)
            assert scanned() == 5 * number
        del stages
        assert scanned() == 15

    def test_undecided_ties_are_scanned_again(self, scanned: Callable[[], int]) -> None:
        index = build("IVF24,Flat", L2, tied(1000, 0))
        query = tied(400, 1)
        assert last(StagedIVF(index, 4, nprobe=20).search(query, 7)).final
        assert 20 * 400 < scanned() < 2 * 20 * 400

    def test_a_search_does_not_change_the_index(self, flat: Any, hnsw: Any, queries: Any) -> None:
        flat.nprobe, hnsw.hnsw.efSearch = 3, 33
        list(StagedIVF(flat, nprobe=20).search(queries[:3], 5))
        list(StagedHNSW(hnsw, 100).search(queries[:3], 5))
        assert (flat.nprobe, flat.parallel_mode, hnsw.hnsw.efSearch) == (3, 0, 33)

    def test_in_several_searches_of_several_threads_at_once(self, flat: Any, hnsw: Any, queries: Any) -> None:
        searches = [StagedIVF(flat, 8, nprobe=20), StagedIVF(flat, 3, nprobe=7), StagedHNSW(hnsw, 60)]
        parts = [(staged, queries[start : start + 50]) for start in range(0, 1000, 50) for staged in searches]
        alone = [last(staged.search(part, 5)) for staged, part in parts]
        running = [staged.search(part, 5) for staged, part in parts]
        found: dict[int, Stage] = {}
        with ThreadPoolExecutor(4) as pool:
            # Each next() in whichever thread is free.
            while len(running) > sum(stage.final for stage in found.values()):
                going = [number for number in range(len(running)) if number not in found or not found[number].final]
                found.update(zip(going, pool.map(lambda number: next(running[number]), going), strict=True))
        for number, stage in enumerate(alone):
            assert_same(found[number], (stage.distances, stage.ids))


class TestWrappedIndexes:
    @pytest.fixture(params=["IDMap", "IDMap2"])
    def mapped(self, request: pytest.FixtureRequest) -> Any:
        ids = np.arange(N)[::-1] * 7 + 10**12
        return build(f"{request.param},PCA8,IVF24,Flat", IP, clustered(N, 0), ids=ids, nprobe=9)

    def test_give_the_callers_own_ids_in_every_stage(self, mapped: Any, queries: Any) -> None:
        for stage in StagedIVF(mapped).search(queries[:50], 5):
            assert ((stage.ids >= 10**12) & (stage.ids % 7 == 10**12 % 7)).all()
        assert_same(stage, mapped.search(queries[:50], 5))

    def test_give_minus_one_where_nothing_was_found(self, mapped: Any, queries: Any) -> None:
        found = last(StagedIVF(mapped, nprobe=1).search(queries[:50], 1000))
        assert (found.ids[:, -1] == -1).all()
        faiss.extract_index_ivf(mapped).nprobe = 1
        assert_same(found, mapped.search(queries[:50], 1000))

    def test_are_seen_as_they_are_after_more_was_added(self, mapped: Any, queries: Any) -> None:
        staged = StagedIVF(mapped)
        mapped.add_with_ids(queries[:50], np.arange(50))
        found = last(staged.search(queries[:50], 5))
        assert (found.ids < 50).any()
        assert_same(found, mapped.search(queries[:50], 5))

    def test_wrapped_hnsw_indexes_are_searched(self, queries: Any) -> None:
        index = build("IDMap2,PCA8,HNSW16,Flat", ids=np.arange(N) + 10**12)
        assert_same(last(StagedHNSW(index).search(queries[:50], 5)), index.search(queries[:50], 5))

    def test_may_be_restricted_to_ids_of_the_caller(self, mapped: Any, flat: Any, hnsw: Any, queries: Any) -> None:
        chosen = np.arange(0, N, 3)
        some = faiss.IDSelectorBatch(chosen)
        found = last(StagedIVF(flat, nprobe=24).search(queries[:50], 5, selector=some))
        assert_same(found, flat.search(queries[:50], 5, params=faiss.SearchParametersIVF(nprobe=24, sel=some)))
        found = last(StagedHNSW(hnsw, 50).search(queries[:50], 5, selector=some))
        assert_same(found, hnsw.search(queries[:50], 5, params=faiss.SearchParametersHNSW(efSearch=50, sel=some)))
        few = faiss.IDSelectorBatch(chosen * 7 + 10**12)
        found = last(StagedIVF(mapped, nprobe=24).search(queries[:50], 5, selector=few))
        assert set(found.ids.ravel().tolist()) <= set((chosen * 7 + 10**12).tolist())
        assert (found.ids != -1).all()


class TestWhatIsNotStagedExactlyIsRefused:
    @pytest.mark.parametrize(
        ("description", "says"),
        [
            ("Flat", "IndexFlat in stages exactly.*StagedHNSW is for HNSW"),
            ("HNSW16,Flat", "IndexHNSWFlat in stages exactly.*StagedHNSW"),
            ("IVF8,Flat,RFlat", "IndexRefineFlat in stages exactly.*stage the base_index"),
            ("IVF8,PQ4x4fs", "IndexIVFPQFastScan in stages exactly.*without fast scan"),
            ("IVF8,RaBitQfs", "IndexIVFRaBitQFastScan in stages exactly.*without fast scan"),
            ("IVF8,RaBitQ4", "IndexIVFRaBitQ in stages exactly.*use RaBitQ with one bit"),
            ("IVF8,PQ4+8", "IndexIVFPQR in stages exactly.*use IndexIVFFlat"),
            ("IVF8,FlatDedup", "IndexIVFFlatDedup in stages exactly.*use IndexIVFFlat"),
            ("PCA8,IVF8,PQ4x4fs", "IndexIVFPQFastScan in stages exactly"),
        ],
    )
    def test_by_ivf_stages(self, description: str, says: str) -> None:
        with pytest.raises(TypeError, match=says):
            StagedIVF(faiss.index_factory(D, description))

    def test_by_hnsw_stages(self) -> None:
        for description in ("Flat", "IVF8,Flat", "NSG8,Flat", "PCA8,Flat"):
            with pytest.raises(TypeError, match=r"StagedHNSW searches HNSW indexes, got Index.*use StagedIVF for IVF"):
                StagedHNSW(faiss.index_factory(D, description))

    @pytest.mark.parametrize("staged", [StagedIVF, StagedHNSW])
    def test_by_both_where_it_is_no_index_of_floats(self, staged: Any) -> None:
        for index in (faiss.IndexBinaryFlat(16), "ivf", None):
            with pytest.raises(TypeError, match="expected a FAISS index of float vectors"):
                staged(index)

    @pytest.mark.parametrize(
        ("setting", "value", "says"),
        [("max_codes", 100, "a limit across stages: set it to 0"), ("parallel_mode", 1, "set it to 0 or 3")],
    )
    def test_for_a_setting_at_once_and_when_set_later(self, setting: str, value: int, says: str, queries: Any) -> None:
        index = build("IVF24,Flat")
        staged = StagedIVF(index)
        setattr(index, setting, value)
        with pytest.raises(ValueError, match=says):
            StagedIVF(index)
        with pytest.raises(ValueError, match=says):
            staged.search(queries, 5)

    @pytest.mark.parametrize(
        ("staged", "options", "says"),
        [
            (StagedIVF, {"stages": 0}, "stages must be at least 1, got 0"),
            (StagedIVF, {"nprobe": 0}, "nprobe must be at least 1, got 0"),
            (StagedIVF, {"growth": "quadratic"}, "growth must be 'equal', 'geometric' or counts"),
            (StagedIVF, {"growth": ()}, "each stage scans at least one cluster"),
            (StagedIVF, {"growth": (1, 0)}, "each stage scans at least one cluster"),
            (StagedIVF, {"growth": (1, 2), "nprobe": 4}, "nprobe=4, but the stages of growth=.* scan 3"),
            (StagedHNSW, {"stages": 0}, "stages must be at least 1, got 0"),
            (StagedHNSW, {"ef_search": 0}, "ef_search must be at least 1, got 0"),
            (StagedHNSW, {"schedule": ()}, "schedule must hold growing efSearch"),
            (StagedHNSW, {"schedule": (8, 8)}, "schedule must hold growing efSearch"),
            (StagedHNSW, {"schedule": (0, 8)}, "schedule must hold growing efSearch"),
            (StagedHNSW, {"schedule": (4, 8), "ef_search": 9}, "ef_search=9, but the last of schedule"),
        ],
    )
    def test_for_senseless_stages(self, staged: Any, options: dict[str, Any], says: str, flat: Any, hnsw: Any) -> None:
        with pytest.raises(ValueError, match=says):
            staged(flat if staged is StagedIVF else hnsw, **options)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
class TestQueries:
    @pytest.fixture
    def index(self, kind: str, flat: Any, hnsw: Any) -> Any:
        flat.nprobe = 5
        return flat if kind == "ivf" else hnsw

    @pytest.fixture
    def staged(self, kind: str, index: Any) -> StagedIVF | StagedHNSW:
        return StagedIVF(index) if kind == "ivf" else StagedHNSW(index)

    def test_may_be_none_at_all(self, staged: Any) -> None:
        found = list(staged.search(np.empty((0, D), np.float32), 5))
        assert found[-1].final
        assert {stage.ids.shape for stage in found} == {(0, 5)}

    def test_may_be_of_any_number_type_and_hold_nan(self, staged: Any, index: Any, queries: Any) -> None:
        expected = index.search(queries[:3], 5)
        for form in (queries[:3].astype(np.float64), queries[:3].tolist(), np.asfortranarray(queries[:3])):
            assert_same(last(staged.search(form, np.int64(5))), expected)
        query = np.full((1, D), np.nan, np.float32)
        assert_same(last(staged.search(query, 5)), index.search(query, 5))

    def test_k_may_exceed_the_size_of_the_index(self, kind: str, queries: Any) -> None:
        few = build("IVF2,Flat" if kind == "ivf" else "HNSW4,Flat", L2, clustered(80, 0))
        staged = StagedIVF(few, nprobe=2) if kind == "ivf" else StagedHNSW(few)
        ids = last(staged.search(queries[:5], 100)).ids
        assert (ids[:, :80] != -1).all() and (ids[:, 80:] == -1).all()

    @pytest.mark.parametrize("shape", [(D,), (3, D + 1), (1, 1, D)])
    def test_of_another_shape_or_for_no_neighbour_are_refused_before_the_search(
        self, shape: tuple[int, ...], staged: Any, queries: Any
    ) -> None:
        with pytest.raises(ValueError, match=r"queries must have the shape \(n, 16\), got \("):
            staged.search(np.zeros(shape), 5)
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            staged.search(queries, 0)


@pytest.mark.parametrize("row", [slice(2, 3), 2], ids=["a row", "a vector"])
async def test_a_retrieval_takes_a_vector_as_an_embedding_model_returns_it(row: Any, hnsw: Any, queries: Any) -> None:
    retrieval = staged_retrieval(StagedHNSW(hnsw), lambda question: queries[row], int, top_k=5)
    found = [each async for each in retrieval("which?")][-1]
    assert found.final
    assert found.documents == hnsw.search(queries[2:3], 5)[1][0].tolist()


class TestImports:
    def test_of_the_package_bring_neither_numpy_nor_faiss(self, python: Any) -> None:
        code = "import sys, ragorder.pipelining; print({'numpy', 'faiss'} & set(sys.modules))"
        assert python("-c", code).stdout == "set()\n"

    def test_errors_without_faiss_name_the_extra(self, python: Any) -> None:
        code = "from ragorder.pipelining import StagedIVF; StagedIVF(None)"
        assert "ImportError: staged search needs faiss" in python("-c", code, blocked=("faiss",)).stderr
        assert "pip install '.[retrieval]'" in python("-c", code, blocked=("faiss",)).stderr
