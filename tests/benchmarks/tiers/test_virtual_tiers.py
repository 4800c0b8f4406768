"""Tiers of an index on the virtual clock: the fast one scans beside the cores, where that is faster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
pytest.importorskip("torch")

from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.common.virtual.costs import ScanCosts, SearchCosts
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.common.virtual.search import VirtualIVF
from ragorder.benchmarks.hedra.tiers.index_tiers import VirtualClusterScan, VirtualTieredIVF, VirtualTiers
from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan

K = 3
LARGE = SearchCosts(code_s=1e-6, vectors=1_000_000, clusters=40_000, busy_cores=8, piece_s=1e-5)


@pytest.fixture(scope="module")
def index() -> Any:
    return build_index(clustered(1000, 16, clusters=40, seed=0), 0.2)


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(30, 16, clusters=40, seed=1)


def served(index: Any, queries: Any, code_s: float | None, *, every: int = 2) -> tuple[Any, float, float]:
    """Ids, seconds until all are found one after another, and the share scanned in the tier."""

    async def main() -> tuple[Any, float, float]:
        tiers, search = None, VirtualIVF(index, LARGE)
        if code_s is not None:
            scan = VirtualClusterScan(TorchClusterScan(), ScanCosts(code_s), LARGE.vectors_of(index))
            tiers = VirtualTiers(scan, 1 << 30, cores=LARGE.busy_cores, every=every)
            search = VirtualTieredIVF(index, LARGE, tiers)
        found = []
        for query in queries:
            stages = [stage async for stage in search.submit(query, K).stages_async()]
            found.append(stages[-1].ids[0].tolist())
        return found, asyncio.get_running_loop().time(), 0.0 if tiers is None else tiers.hit_share

    found: tuple[Any, float, float] = run_virtual(main())
    assert found[0] == index.search(queries, K)[1].tolist()
    return found


def test_what_it_holds_is_scanned_beside_the_cores(index: Any, queries: Any) -> None:
    _, alone_s, _ = served(index, queries, None)
    first = served(index, queries, LARGE.code_s / 80)
    assert first == served(index, queries, LARGE.code_s / 80)
    _, both_s, share = first
    assert share > 0.5
    assert both_s < 0.7 * alone_s


def test_a_slower_one_is_only_tried(index: Any, queries: Any) -> None:
    _, alone_s, _ = served(index, queries, None)
    _, slow_s, share = served(index, queries, LARGE.code_s, every=20)
    assert 0 < share < 0.2
    assert slow_s < 2 * alone_s
