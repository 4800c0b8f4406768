"""A scan of clusters in torch finds what FAISS finds in them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers, TieredScanner
from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget

D = 24
METRICS = {"L2": faiss.METRIC_L2, "inner product": faiss.METRIC_INNER_PRODUCT}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def vectors(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((count, D), np.float32)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("metric", METRICS)
class TestAScan:
    def test_finds_the_best_of_each_querys_own_clusters(self, metric: Any, device: str) -> None:
        scan = TorchClusterScan(metric, device)
        stored = {cluster: vectors(10 + 30 * cluster, cluster) for cluster in range(5)}
        for cluster, each in stored.items():
            scan.put(cluster, each)
        queries = vectors(7, 99)
        chosen = np.array([[0, 3, -1], [4, -1, -1], [2, 1, 0], [-1, -1, -1], [3, 4, 2], [0, -1, 1], [1, 2, 3]])
        distances, places = scan.scan(queries, 12, chosen)
        assert distances.shape == places.shape == (7, 12)
        for row, numbers in enumerate(chosen.tolist()):
            there = [number for number in numbers if number >= 0]
            index = faiss.IndexFlat(D, METRICS[metric])
            index.add(np.concatenate([np.empty((0, D), np.float32), *(stored[number] for number in there)]))
            expected, offsets = index.search(queries[row : row + 1], 12)
            names = [number << 32 | offset for number in there for offset in range(len(stored[number]))]
            assert places[row].tolist() == [names[offset] if offset >= 0 else -1 for offset in offsets[0]]
            np.testing.assert_allclose(distances[row], expected[0], rtol=1e-5, atol=1e-5)

    def test_of_vectors_far_from_the_origin_is_as_precise(self, metric: Any, device: str) -> None:
        scan = TorchClusterScan(metric, device)
        stored = vectors(200, 0) + 100
        scan.put(3, stored)
        index = faiss.IndexFlat(D, METRICS[metric])
        index.add(stored)
        query = vectors(1, 1) + 100
        distances, _ = scan.scan(query, 5, np.array([[3]]))
        np.testing.assert_allclose(distances, index.search(query, 5)[0], rtol=1e-5)

    def test_does_not_see_a_cluster_that_was_dropped(self, metric: Any, device: str) -> None:
        scan = TorchClusterScan(metric, device)
        mine = vectors(5, 0)
        scan.put(0, mine)
        before = scan.scan(mine[:1], 1, np.array([[0]]))
        mine[:] = 0
        assert scan.scan(vectors(5, 0)[:1], 1, np.array([[0]]))[0] == before[0]
        scan.drop(0)
        with pytest.raises(KeyError):
            scan.scan(mine[:1], 1, np.array([[0]]))

    def test_is_a_tier_of_an_index(self, metric: Any, device: str) -> None:
        index = faiss.index_factory(D, "IVF16,Flat", METRICS[metric])
        index.train(vectors(1500, 0))
        index.add(vectors(1500, 0))
        scan = TorchClusterScan(metric, device)
        tiers = IndexTiers(scan, scan.bytes_of(700, D), every=2)
        scanner = partial(TieredScanner, tiers)
        search = ContinuousIVF(index, nprobe=8, cores=1, budget=Budget(1e-12), scanner=scanner, thread=False)
        queries = vectors(60, 1)
        for row in range(60):
            tiers.costs.code_s = tiers.costs.call_s = 1e-12
            found = search.submit(queries[row], 5).result()
            distances, ids = index.search(queries[row : row + 1], 5, params=faiss.SearchParametersIVF(nprobe=8))
            np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-4)
            assert found.ids.tolist() == ids.tolist()
        assert tiers.hit_share > 0.1


def test_another_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="metric must be 'L2' or 'inner product', got 'L1'"):
        TorchClusterScan("L1")  # type: ignore[arg-type]
