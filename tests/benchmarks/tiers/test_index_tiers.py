"""The clusters that are used most are scanned in a faster place, and searches find the same."""

from __future__ import annotations

import logging
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import IP, L2, D, build, clustered

from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers, TieredScanner
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, History

N, NLIST = 2000, 24
EVERYTHING = 1 << 30


class ExactScan:
    """A fast tier that computes as FAISS does: a flat index for each cluster."""

    def __init__(self, metric: str = "L2") -> None:
        self.metric = metric
        self.held: dict[int, Any] = {}
        self.largest_bytes = 0
        self.scans = 0
        self.fails = False

    def bytes_of(self, vectors: int, dimensions: int) -> int:
        return 4 * vectors * dimensions

    def put(self, cluster: int, vectors: Any) -> None:
        if self.fails:
            raise MemoryError("full")
        assert cluster not in self.held
        index = self.held[cluster] = faiss.IndexFlat(D, L2 if self.metric == "L2" else IP)
        index.add(vectors)
        stored = sum(self.bytes_of(each.ntotal, D) for each in self.held.values())
        self.largest_bytes = max(self.largest_bytes, stored)

    def drop(self, cluster: int) -> None:
        del self.held[cluster]

    def scan(self, queries: Any, k: int, clusters: Any) -> tuple[Any, Any]:
        if self.fails:
            raise RuntimeError("the device is lost")
        self.scans += 1
        worst = np.finfo(np.float32).max * (1 if self.metric == "L2" else -1)
        distances, places = np.full((len(queries), k), worst, np.float32), np.full((len(queries), k), -1)
        for row, numbers in enumerate(clusters.tolist()):
            found = [(worst, -1)] * k
            for number in numbers:
                if number >= 0:
                    near, offsets = self.held[number].search(queries[row : row + 1], k)
                    pairs = zip(near[0].tolist(), offsets[0].tolist(), strict=True)
                    found += [(key, number << 32 | offset) for key, offset in pairs if offset >= 0]
            found.sort(key=lambda pair: pair[0], reverse=self.metric != "L2")
            distances[row], places[row] = zip(*found[:k], strict=True)
        return distances, places


def tiers_of(fast: ExactScan, capacity_bytes: int = EVERYTHING, every: int = 1, **options: Any) -> IndexTiers:
    """Tiers whose fast one takes no time."""
    return IndexTiers(fast, capacity_bytes, every=every, clock=lambda: 0.0, **options)


def search_with(index: Any, tiers: IndexTiers, nprobe: int = 9, cores: int = 1) -> ContinuousIVF:
    scanner = partial(TieredScanner, tiers)
    return ContinuousIVF(index, nprobe=nprobe, cores=cores, budget=Budget(1e-12), scanner=scanner, thread=False)


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(200, 1)


@pytest.mark.parametrize("metric", ["L2", "inner product"])
@pytest.mark.parametrize("description", ["IVF24,Flat", "IVF24,SQ8", "IVF24,PQ4x4"])
def test_results_of_both_tiers_are_merged(description: str, metric: str, queries: Any) -> None:
    index = build(description, L2 if metric == "L2" else IP)
    tiers = tiers_of(ExactScan(metric), capacity_bytes=40_000)
    search = search_with(index, tiers)
    for row in range(100):
        found = search.submit(queries[row], 5, history=History() if row % 2 else None).result()
        distances, ids = index.search(queries[row : row + 1], 5, params=faiss.SearchParametersIVF(nprobe=9))
        np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-5)
        if len(np.unique(distances)) == 5:
            different = found.ids != ids
            np.testing.assert_allclose(found.distances[different], distances[different], rtol=1e-5, atol=1e-6)
    assert 0.2 < tiers.hit_share < 0.9


@settings(max_examples=examples(100))
@given(data=st.data(), cores=st.integers(1, 3), every=st.integers(1, 9), share=st.floats(0.02, 1.2))
def test_whatever_is_held_and_whoever_joins(data: st.DataObject, cores: int, every: int, share: float) -> None:
    index, queries = build(), clustered(30, 1)
    capacity = int(share * 4 * N * D)
    fast = ExactScan()
    search = search_with(index, tiers_of(fast, capacity, every), cores=cores)
    handles = []
    for step in data.draw(st.lists(st.sampled_from(["join", "advance", "advance"]), max_size=60)):
        if step == "join":
            handles.append(search.submit(queries[len(handles) % 30], 5))
        search.advance()
    while search.advance():
        pass
    for number, handle in enumerate(handles):
        query = queries[number % 30, None]
        distances, ids = index.search(query, 5, params=faiss.SearchParametersIVF(nprobe=9))
        np.testing.assert_allclose(handle.result().distances, distances, rtol=1e-4, atol=1e-5)
        assert set(handle.result().ids[0].tolist()) == set(ids[0].tolist())
    assert fast.largest_bytes <= capacity


def test_the_most_used_clusters_are_held_and_follow_the_use(queries: Any) -> None:
    index = build()
    _, first = index.quantizer.search(queries[:1], 3)
    _, last = index.quantizer.search(-queries[:1], 3)
    fast = ExactScan()
    sizes = [index.get_list_size(cluster) for cluster in range(NLIST)]
    capacity = 4 * D * max(sum(sizes[cluster] for cluster in near[0]) for near in (first, last))
    tiers = tiers_of(fast, capacity, every=5, half_life=5)
    search = search_with(index, tiers, nprobe=3)
    for query, near in ((queries[0], first), (-queries[0], last)):
        for _ in range(20):
            search.submit(query, 5).result()
        assert set(near[0].tolist()) <= set(fast.held)


def test_a_fifth_of_the_clusters_serves_most_of_a_skewed_load(queries: Any) -> None:
    index = build()
    tiers = tiers_of(ExactScan(), capacity_bytes=4 * N * D // 5, every=10)
    search = search_with(index, tiers, nprobe=3)
    popular = 1 / np.arange(1, 101) ** 1.3
    for row in np.random.default_rng(0).choice(100, 600, p=popular / popular.sum()):
        search.submit(queries[row], 5).result()
    assert tiers.hit_share > 0.4
    assert tiers.held_bytes <= tiers.capacity_bytes


def test_clusters_are_loaded_one_at_a_time_and_never_outside_of_a_piece(queries: Any) -> None:
    index, fast = build(), ExactScan()
    search = search_with(index, tiers_of(fast, every=1))
    search.submit(queries[0], 5)
    held = []
    while search.advance():
        held.append(len(fast.held))
        assert len(fast.held) == held[-1]
    assert held[0] == 0
    assert held == sorted(held)
    assert held[-1] > 0


def test_a_slower_tier_is_only_tried(queries: Any) -> None:
    """A scan takes it ten seconds: after each exchange it is tried once."""
    fast, ticks = ExactScan(), count()
    search = search_with(build(), IndexTiers(fast, EVERYTHING, every=50, clock=lambda: 10.0 * next(ticks)))
    for query in queries:
        search.submit(query, 5).result()
    assert fast.held
    assert 0 < fast.scans <= search.pieces // 50


def test_searches_with_a_selector_are_scanned_on_the_cores(queries: Any) -> None:
    index, fast = build(), ExactScan()
    search = search_with(index, tiers_of(fast))
    for query in queries[:40]:
        search.submit(query, 5).result()
    scans = fast.scans
    params = faiss.SearchParametersIVF(nprobe=9, sel=faiss.IDSelectorRange(0, N // 2))
    for row in range(20):
        found = search.submit(queries[row], 5, params=params).result()
        assert found.ids.tolist() == index.search(queries[row : row + 1], 5, params=params)[1].tolist()
    assert fast.scans == scans > 0


@pytest.mark.parametrize("when", ["loading", "scanning"])
def test_if_it_fails_the_cores_go_on_alone(when: str, queries: Any, caplog: pytest.LogCaptureFixture) -> None:
    index, fast = build(), ExactScan()
    search = search_with(index, tiers_of(fast))
    if when == "loading":
        fast.fails = True
    for row in range(40):
        if row == 20:
            fast.fails = True
        found = search.submit(queries[row], 5).result()
        expected = index.search(queries[row : row + 1], 5, params=faiss.SearchParametersIVF(nprobe=9))
        assert found.ids.tolist() == expected[1].tolist()
    assert len(fast.held) == 0
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert "the fast tier of the index failed" in record.message


def test_if_it_fails_to_drop_a_cluster_they_do_so_too(queries: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(ExactScan):
        def drop(self, cluster: int) -> None:
            raise RuntimeError("the device is lost")

    index = build()
    search = search_with(index, tiers_of(Stuck(), 40_000, half_life=5))
    for row in range(100):
        found = search.submit(queries[row], 5).result()
        expected = index.search(queries[row : row + 1], 5, params=faiss.SearchParametersIVF(nprobe=9))
        assert found.ids.tolist() == expected[1].tolist()
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert "the fast tier of the index failed" in record.message


def test_what_was_added_to_the_index_is_found(queries: Any) -> None:
    index, fast = build(), ExactScan()
    search = search_with(index, tiers_of(fast))
    for query in queries[:20]:
        search.submit(query, 5).result()
    assert fast.held
    index.add(queries)
    for row in range(20):
        assert search.submit(queries[row], 1).result().distances == 0


@pytest.mark.parametrize("option", ["capacity_bytes", "every", "half_life"])
def test_sizes_of_nothing_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        IndexTiers(ExactScan(), **{"capacity_bytes": 1, option: 0})


def test_so_are_another_metric_another_search_and_vectors_that_are_not_decoded() -> None:
    with pytest.raises(ValueError, match="compares by inner product, but the index by L2"):
        search_with(build(), IndexTiers(ExactScan("inner product"), 1))
    tiers = IndexTiers(ExactScan(), 1)
    search_with(build(), tiers)
    with pytest.raises(ValueError, match="belong to another search"):
        search_with(build(), tiers)
    with pytest.raises(TypeError, match="IndexIVFRaBitQ cannot have tiers: use IndexIVFFlat"):
        search_with(build("IVF24,RaBitQ"), IndexTiers(ExactScan(), 1))
