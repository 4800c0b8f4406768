"""Fast tier for the most used clusters of an index (HedraRAG section 4.4)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.common.virtual.costs import ScanCosts, SearchCosts
from ragorder.benchmarks.common.virtual.search import VirtualIVF
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.merge import BestResults, ScannedPart
from ragorder.pipelining.search.running import RunningSearch, Visits
from ragorder.pipelining.search.scanner import PieceScanner, Rows
from ragorder.pipelining.staged._faiss import load_faiss
from ragorder.pipelining.staged._ivf import ClusterIndex

# A cluster in the tier stays unless others are used this much more: an exchange takes time.
_STAY = 1.1
_TRIALS = 8


class ClusterScan(Protocol):
    """A fast tier for the vectors of some clusters. `put` and `scan` may run in two threads."""

    def bytes_of(self, vectors: int, dimensions: int) -> int: ...

    def put(self, cluster: int, vectors: NDArray[np.float32]) -> None: ...

    def drop(self, cluster: int) -> None: ...

    def scan(
        self, queries: NDArray[np.float32], k: int, clusters: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return distances and locations (cluster << 32 | offset) of the k best in each row of `clusters`.

        Cluster -1 means no cluster. As in FAISS, -1 and its worst distance if fewer are found.
        """


@dataclass(frozen=True, slots=True)
class FastShare:
    visits: Visits
    chosen: NDArray[np.bool_]
    part: Future[tuple[ScannedPart, float]]


class IndexTiers:
    """Keeps the most used clusters of an inner product index in `fast`, with at most `capacity_bytes`.

    Clusters in the tier are scanned there while the cores scan the others, if measured costs say that this is faster.
    Clusters are exchanged every `every` pieces; the weight of a use halves after `half_life` pieces.
    """

    def __init__(
        self,
        fast: ClusterScan,
        capacity_bytes: int,
        *,
        every: int = 50,
        half_life: int = 1000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.costs = ClusterCosts(1e-9)
        self.codes = 0
        self.fast_codes = 0
        self._fast = fast
        self._every = every
        self._decay = 0.5 ** (every / half_life)
        self._clock = clock
        self._index: ClusterIndex
        self._trials = _TRIALS
        self._pieces = 0
        self._bytes = self._uses = np.zeros(1)
        self._held = np.zeros(1, bool)
        self._to_load: deque[int] = deque()
        self._loading: Future[None] | None = None
        self._stop_loading = False
        self._threads = ThreadPoolExecutor(2, "ragorder-tiers")

    @property
    def hit_share(self) -> float:
        return self.fast_codes / self.codes if self.codes else 0.0

    def attach(self, index: ClusterIndex, sizes: NDArray[np.int64]) -> None:
        """Begin to serve an index whose clusters have these sizes."""
        self._index = index
        self._bytes = np.array([self._fast.bytes_of(size, index.ivf.d) for size in sizes.tolist()], float)
        self._uses, self._held = np.zeros(len(sizes)), np.zeros(len(sizes), bool)

    def start(self, visits: Visits, queries: NDArray[np.float32], k: int, slow_s: float) -> FastShare | None:
        """Scan a piece's visits in the tier until `end`; return None if the cores, in `slow_s`, are faster."""
        np.add.at(self._uses, visits.clusters, 1)
        self.codes += int(visits.codes.sum())
        chosen = self._held[visits.clusters]
        if self._to_load:
            self._stop_loading = False
            self._loading = self._threads.submit(self._load)
        if not chosen.any():
            return None
        share = visits.part(chosen)
        codes = int(share.codes.sum())
        if self.costs.calls >= self._trials and self.costs.seconds(codes) >= slow_s:
            return None
        self.fast_codes += codes
        return FastShare(share, chosen, self._threads.submit(self._scan, share, queries, k))

    def end(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            self._stop_loading = True
            loading.result()
        self._pieces += 1
        if self._pieces % self._every == 0:
            self._exchange()

    def close(self) -> None:
        self._threads.shutdown()

    def _scan(self, visits: Visits, queries: NDArray[np.float32], k: int) -> tuple[ScannedPart, float]:
        rows, clusters, _ = visits.padded()
        start_s = self._clock()
        distances, locations = self._fast.scan(queries[rows], k, clusters)
        seconds = self._clock() - start_s
        self.costs.learn(int(visits.codes.sum()), seconds)
        return ScannedPart(rows, -distances, locations, locations=True), seconds

    def _load(self) -> None:
        """Load at least one cluster, and others until the piece ends: between pieces the index may change."""
        while self._to_load:
            cluster = self._to_load.popleft()
            self._fast.put(cluster, _vectors(self._index, cluster))
            self._held[cluster] = True
            if self._stop_loading:
                return

    def _exchange(self) -> None:
        """Choose the most used clusters per byte: since a visit's work grows with bytes, the most visited."""
        order = np.argsort(-self._uses * np.where(self._held, _STAY, 1.0), kind="stable")
        order = order[(self._uses[order] > 0) & (self._bytes[order] > 0) & (self._bytes[order] <= self.capacity_bytes)]
        chosen = order[np.cumsum(self._bytes[order]) <= self.capacity_bytes]
        stays = np.zeros(len(self._held), bool)
        stays[chosen] = True
        for cluster in np.flatnonzero(self._held & ~stays).tolist():
            self._held[cluster] = False
            self._fast.drop(cluster)
        self._to_load = deque(cluster for cluster in chosen.tolist() if not self._held[cluster])
        self._uses *= self._decay
        # Costs change with other work of the device.
        self._trials = self.costs.calls + 1


class TieredScanner(PieceScanner):
    """Has `tiers` scan the clusters that they hold, while the cores scan a piece's others. For one `ContinuousIVF`."""

    def __init__(
        self, tiers: IndexTiers, index: ClusterIndex, cores: int, costs: ClusterCosts, clock: Callable[[], float]
    ) -> None:
        super().__init__(index, cores, costs, clock)
        self._tiers = tiers
        self._attached = False

    def scan(self, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64]) -> list[BestResults]:
        if not self._attached:
            self._tiers.attach(self._index, sizes)
            self._attached = True
        return super().scan(piece, sizes)

    def close(self) -> None:
        super().close()
        self._tiers.close()

    def _whole_alone(self, piece: Sequence[tuple[RunningSearch, int]]) -> BestResults | None:
        return None

    def _parts(self, visits: Visits, rows: Rows) -> list[ScannedPart]:
        core_s = int(visits.codes.sum()) * self.costs.code_s / self._cores
        share = self._tiers.start(visits, rows.queries, rows.kept, core_s)
        before_s = self.scan_s
        try:
            if share is None:
                return super()._parts(visits, rows)
            parts = super()._parts(visits.part(~share.chosen), rows)
            part, seconds = share.part.result()
            self.scan_s = max(self.scan_s, before_s + seconds)
            return [*parts, part]
        finally:
            self._tiers.end()


def _vectors(index: ClusterIndex, cluster: int) -> NDArray[np.float32]:
    ivf: Any = index.ivf
    faiss, lists, size = load_faiss(), ivf.invlists, ivf.get_list_size(cluster)
    vectors = np.empty((size, ivf.d), np.float32)
    if size:
        numbers, codes = np.full(size, cluster, np.int64), lists.get_codes(cluster)
        try:
            ivf.decode_vectors(size, codes, faiss.swig_ptr(numbers), faiss.swig_ptr(vectors))
        finally:
            lists.release_codes(cluster, codes)
    return vectors


T = TypeVar("T")


class VirtualClusterScan:
    """`scan`, whose vectors count for `scale` each; `now_s` passes while it scans, by `costs`."""

    def __init__(self, scan: ClusterScan, costs: ScanCosts, scale: float) -> None:
        self.now_s = 0.0
        self._scan = scan
        self._costs = costs
        self._scale = scale
        self._sizes: dict[int, int] = {}

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
    """`IndexTiers` in virtual time; clusters are loaded after the piece in which they are copied."""

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
