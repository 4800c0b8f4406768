"""An index in a file with cold pages, partly held in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("scipy")


from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.hedra.locality import skew
from ragorder.benchmarks.hedra.tiers import experiment
from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers
from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan

D = 16


@pytest.fixture(scope="module")
def index() -> Any:
    return build_index(clustered(3000, D, clusters=60, seed=0), 0.05)


@pytest.mark.parametrize("share", [0.4, 0.69, 0.9])
def test_questions_have_the_skew_that_is_asked_for(share: float, index: Any) -> None:
    queries = experiment.skewed_queries(index, 2000, share, seed=1)
    assert skew(index, queries, [0.2])["0.2"] == pytest.approx(share, abs=0.03)


def test_a_cold_index_finds_the_same(index: Any, tmp_path: Path) -> None:
    queries = clustered(20, D, clusters=60, seed=1)
    cold = experiment.ColdIndex(index, tmp_path / "index")
    cold.index.nprobe = index.nprobe
    for query in queries:
        cold.cool()
        assert cold.index.search(query[None], 3)[1].tolist() == index.search(query[None], 3)[1].tolist()
    cold.close()


def test_a_fifth_of_the_clusters_has_most_hits_at_the_papers_skew(index: Any) -> None:
    queries = experiment.skewed_queries(index, 1200, 0.69, seed=1)
    fast = TorchClusterScan()
    # Its time is not looked at: the fast tier is used for whatever it holds.
    tiers = IndexTiers(fast, int(0.2 * fast.bytes_of(index.ntotal, D)), every=50, clock=lambda: 0.0)
    times, hit_share = experiment.latencies(index, queries, index.nprobe, tiers, lambda: None, 600)
    assert len(times) == 1200
    assert 0.6 <= hit_share <= 0.75
