"""Fast tier of an index on a virtual clock: real results of a small index, times of a large one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.hedra.tiers.index_tiers import ClusterScan, FastShare, IndexTiers, TieredScanner
from ragorder.eval.virtual.costs import ScanCosts, SearchCosts
from ragorder.eval.virtual.search import VirtualIVF
from ragorder.pipelining.search.running import Visits

__all__ = ["VirtualClusterScan", "VirtualTieredIVF", "VirtualTiers"]

T = TypeVar("T")


class VirtualClusterScan:
    """`scan`, whose vectors count for `scale` each; `now_s` passes while it scans, by `costs`."""

    def __init__(self, scan: ClusterScan, costs: ScanCosts, scale: float) -> None:
        self.now_s = 0.0
        self._scan = scan
        self._costs = costs
        self._scale = scale
        self._sizes: dict[int, int] = {}

    @property
    def metric(self) -> str:
        return self._scan.metric

    def bytes_of(self, vectors: int, dimensions: int) -> int:
        return self._scan.bytes_of(vectors, dimensions)

    def put(self, cluster: int, vectors: NDArray[np.float32]) -> None:
        self._scan.put(cluster, vectors)
        self._sizes[cluster] = len(vectors)

    def drop(self, cluster: int) -> None:
        self._scan.drop(cluster)
        del self._sizes[cluster]

    def scan(
        self, queries: NDArray[np.float32], k: int, clusters: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        codes = sum(self._sizes[cluster] for cluster in clusters[clusters >= 0].tolist())
        self.now_s += self._costs.scan_seconds(self._scale * codes)
        return self._scan.scan(queries, k, clusters)


class VirtualTiers(IndexTiers):
    """`IndexTiers` whose scans take the time of a `VirtualClusterScan`. Clusters to load are there after the piece in
    which they are copied: copies take no time from the cores. `scan_s`: of the last piece."""

    def __init__(self, fast: VirtualClusterScan, capacity_bytes: int, *, cores: int, **options: Any) -> None:
        super().__init__(fast, capacity_bytes, clock=lambda: fast.now_s, **options)
        self.scan_s = 0.0
        self._clocked = fast
        self._cores_scanning = cores
        self._threads.shutdown()
        self._threads = _AtOnce()  # type: ignore[assignment]

    def start(self, visits: Visits, queries: NDArray[np.float32], k: int, slow_s: float) -> FastShare | None:
        # One thread of this process scans for all the cores.
        before_s = self._clocked.now_s
        share = super().start(visits, queries, k, slow_s / self._cores_scanning)
        self.scan_s = self._clocked.now_s - before_s
        return share


class VirtualTieredIVF(VirtualIVF):
    """`VirtualIVF` whose cores scan what `tiers` do not, meanwhile."""

    def __init__(self, index: Any, costs: SearchCosts, tiers: VirtualTiers) -> None:
        super().__init__(index, costs, scanner=partial(TieredScanner, tiers))
        self._tiers = tiers
        self._fast_codes = 0

    def _seconds(self, codes: float) -> float:
        fast_codes, self._fast_codes = self._tiers.fast_codes - self._fast_codes, self._tiers.fast_codes
        return max(super()._seconds(codes - fast_codes), self._tiers.scan_s)


class _AtOnce(Executor):
    """Runs what it is given before it returns, so that nothing depends on threads."""

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future
