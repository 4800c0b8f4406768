"""A scan of clusters in torch finds what FAISS finds in them."""

from __future__ import annotations

from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan

D = 24
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def vectors(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((count, D), np.float32)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_finds_the_best_of_each_querys_own_clusters(device: str) -> None:
    scan = TorchClusterScan(device)
    stored = {cluster: vectors(10 + 30 * cluster, cluster) for cluster in range(5)}
    for cluster, each in stored.items():
        scan.put(cluster, each)
    queries = vectors(7, 99)
    chosen = np.array([[0, 3, -1], [4, -1, -1], [2, 1, 0], [-1, -1, -1], [3, 4, 2], [0, -1, 1], [1, 2, 3]])
    distances, places = scan.scan(queries, 12, chosen)
    assert distances.shape == places.shape == (7, 12)
    for row, numbers in enumerate(chosen.tolist()):
        there = [number for number in numbers if number >= 0]
        index = faiss.IndexFlatIP(D)
        index.add(np.concatenate([np.empty((0, D), np.float32), *(stored[number] for number in there)]))
        expected, offsets = index.search(queries[row : row + 1], 12)
        names = [number << 32 | offset for number in there for offset in range(len(stored[number]))]
        assert places[row].tolist() == [names[offset] if offset >= 0 else -1 for offset in offsets[0]]
        np.testing.assert_allclose(distances[row], expected[0], rtol=1e-5, atol=1e-5)


def test_does_not_see_a_cluster_that_was_dropped(device: str) -> None:
    scan = TorchClusterScan(device)
    mine = vectors(5, 0)
    scan.put(0, mine)
    before = scan.scan(mine[:1], 1, np.array([[0]]))
    mine[:] = 0
    assert scan.scan(vectors(5, 0)[:1], 1, np.array([[0]]))[0] == before[0]
    scan.drop(0)
    with pytest.raises(KeyError):
        scan.scan(mine[:1], 1, np.array([[0]]))
