"""The clusters that are used most are scanned in a faster place, and searches find the same."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import IP, D, build, clustered

from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers, TieredScanner
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, History

N, NLIST = 2000, 24
EVERYTHING = 1 << 30


class ExactScan:
    """A fast tier that computes as FAISS does: a flat index for each cluster."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.largest_bytes = 0
        self.scans = 0

    def bytes_of(self, vectors: int, dimensions: int) -> int:
        return 4 * vectors * dimensions

    def put(self, cluster: int, vectors: Any) -> None:
        assert cluster not in self.held
        index = self.held[cluster] = faiss.IndexFlatIP(D)
        index.add(vectors)
        stored = sum(self.bytes_of(each.ntotal, D) for each in self.held.values())
        self.largest_bytes = max(self.largest_bytes, stored)

    def drop(self, cluster: int) -> None:
        del self.held[cluster]

    def scan(self, queries: Any, k: int, clusters: Any) -> tuple[Any, Any]:
        self.scans += 1
        worst = np.finfo(np.float32).min
        distances, places = np.full((len(queries), k), worst, np.float32), np.full((len(queries), k), -1)
        for row, numbers in enumerate(clusters.tolist()):
            found = [(worst, -1)] * k
            for number in numbers:
                if number >= 0:
                    near, offsets = self.held[number].search(queries[row : row + 1], k)
                    pairs = zip(near[0].tolist(), offsets[0].tolist(), strict=True)
                    found += [(key, number << 32 | offset) for key, offset in pairs if offset >= 0]
            found.sort(key=lambda pair: pair[0], reverse=True)
            distances[row], places[row] = zip(*found[:k], strict=True)
        return distances, places


def inner_product() -> Any:
    return build(metric=IP)


def tiers_of(fast: ExactScan, capacity_bytes: int = EVERYTHING, every: int = 1, **options: Any) -> IndexTiers:
    """Tiers whose fast one takes no time."""
    return IndexTiers(fast, capacity_bytes, every=every, clock=lambda: 0.0, **options)


def search_with(index: Any, tiers: IndexTiers, nprobe: int = 9, cores: int = 1) -> ContinuousIVF:
    scanner = partial(TieredScanner, tiers)
    return ContinuousIVF(index, nprobe=nprobe, cores=cores, budget=Budget(1e-12), scanner=scanner, thread=False)


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(200, 1)


def test_results_of_both_tiers_are_merged(queries: Any) -> None:
    index = inner_product()
    tiers = tiers_of(ExactScan(), capacity_bytes=40_000)
    search = search_with(index, tiers)
    for row in range(100):
        found = search.submit(queries[row], 5, history=History() if row % 2 else None).result()
        distances, ids = index.search(queries[row : row + 1], 5, params=faiss.SearchParametersIVF(nprobe=9))
        np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-5)
        assert found.ids.tolist() == ids.tolist()
    assert 0.2 < tiers.hit_share < 0.9


@settings(max_examples=examples(100))
@given(data=st.data(), cores=st.integers(1, 3), every=st.integers(1, 9), share=st.floats(0.02, 1.2))
def test_whatever_is_held_and_whoever_joins(data: st.DataObject, cores: int, every: int, share: float) -> None:
    index, queries = inner_product(), clustered(30, 1)
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
    index = inner_product()
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
    index = inner_product()
    tiers = tiers_of(ExactScan(), capacity_bytes=4 * N * D // 5, every=10)
    search = search_with(index, tiers, nprobe=3)
    popular = 1 / np.arange(1, 101) ** 1.3
    for row in np.random.default_rng(0).choice(100, 600, p=popular / popular.sum()):
        search.submit(queries[row], 5).result()
    assert tiers.hit_share > 0.4


def test_clusters_are_loaded_one_at_a_time_and_never_outside_of_a_piece(queries: Any) -> None:
    index, fast = inner_product(), ExactScan()
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
    search = search_with(inner_product(), IndexTiers(fast, EVERYTHING, every=50, clock=lambda: 10.0 * next(ticks)))
    for query in queries:
        search.submit(query, 5).result()
    assert fast.held
    assert 0 < fast.scans <= search.pieces // 50
