"""The clusters that are used most are scanned in a faster place, and searches find the same."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
pytest.importorskip("torch")

from support.ivf import IP, D, build, clustered

from ragorder.benchmarks.common.vectors import build_index
from ragorder.benchmarks.common.vectors import clustered as made
from ragorder.benchmarks.common.virtual.costs import ScanCosts, SearchCosts
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.common.virtual.search import VirtualIVF
from ragorder.benchmarks.hedra.tiers.index_tiers import (
    IndexTiers,
    TieredScanner,
    VirtualClusterScan,
    VirtualTieredIVF,
    VirtualTiers,
)
from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, History

N, NLIST = 2000, 24
EVERYTHING = 1 << 30


class CountedScan(TorchClusterScan):
    """A fast tier that knows what it holds, the most that it ever held, and how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.largest_bytes = self.scans = 0

    def put(self, cluster: int, vectors: Any) -> None:
        assert cluster not in self.held
        super().put(cluster, vectors)
        self.held[cluster] = self.bytes_of(*vectors.shape)
        self.largest_bytes = max(self.largest_bytes, sum(self.held.values()))

    def drop(self, cluster: int) -> None:
        super().drop(cluster)
        del self.held[cluster]

    def scan(self, queries: Any, k: int, clusters: Any) -> tuple[Any, Any]:
        self.scans += 1
        return super().scan(queries, k, clusters)


def inner_product() -> Any:
    return build(metric=IP)


def tiers_of(fast: CountedScan, capacity_bytes: int = EVERYTHING, every: int = 1, **options: Any) -> IndexTiers:
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
    tiers = tiers_of(CountedScan(), capacity_bytes=40_000)
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
    fast = CountedScan()
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
    fast = CountedScan()
    sizes = [index.get_list_size(cluster) for cluster in range(NLIST)]
    capacity = 4 * D * max(sum(sizes[cluster] for cluster in near[0]) for near in (first, last))
    tiers = tiers_of(fast, capacity, every=5, half_life=5)
    search = search_with(index, tiers, nprobe=3)
    for query, near in ((queries[0], first), (-queries[0], last)):
        for _ in range(20):
            search.submit(query, 5).result()
        assert set(near[0].tolist()) <= set(fast.held)


def test_clusters_are_loaded_one_at_a_time_and_never_outside_of_a_piece(queries: Any) -> None:
    index, fast = inner_product(), CountedScan()
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
    fast, ticks = CountedScan(), count()
    search = search_with(inner_product(), IndexTiers(fast, EVERYTHING, every=50, clock=lambda: 10.0 * next(ticks)))
    for query in queries:
        search.submit(query, 5).result()
    assert fast.held
    assert 0 < fast.scans <= search.pieces // 50


class TestOnTheVirtualClock:
    """The fast tier scans beside the cores, where that is faster."""

    LARGE = SearchCosts(code_s=1e-6, vectors=1_000_000, clusters=40_000, busy_cores=8, piece_s=1e-5)

    def served(self, code_s: float | None, *, every: int = 2) -> tuple[float, float]:
        """Seconds until all queries are answered one after another, and the share scanned in the tier."""
        index, queries = build_index(made(1000, 16, clusters=40, seed=0), 0.2), made(30, 16, clusters=40, seed=1)

        async def main() -> tuple[Any, float, float]:
            tiers, search = None, VirtualIVF(index, self.LARGE)
            if code_s is not None:
                scan = VirtualClusterScan(TorchClusterScan(), ScanCosts(code_s), self.LARGE.vectors_of(index))
                tiers = VirtualTiers(scan, 1 << 30, cores=self.LARGE.busy_cores, every=every)
                search = VirtualTieredIVF(index, self.LARGE, tiers)
            found = []
            for query in queries:
                stages = [stage async for stage in search.submit(query, 3).stages_async()]
                found.append(stages[-1].ids[0].tolist())
            return found, asyncio.get_running_loop().time(), 0.0 if tiers is None else tiers.hit_share

        ids, seconds, share = run_virtual(main())
        assert ids == index.search(queries, 3)[1].tolist()
        return seconds, share

    def test_what_it_holds_is_scanned_beside_the_cores(self) -> None:
        alone_s, _ = self.served(None)
        both_s, share = self.served(self.LARGE.code_s / 80)
        assert (both_s, share) == self.served(self.LARGE.code_s / 80)
        assert share > 0.5
        assert both_s < 0.7 * alone_s

    def test_a_slower_one_is_only_tried(self) -> None:
        alone_s, _ = self.served(None)
        slow_s, share = self.served(self.LARGE.code_s, every=20)
        assert 0 < share < 0.2
        assert slow_s < 2 * alone_s
