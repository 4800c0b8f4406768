"""Fast tier for the most used clusters of an index (HedraRAG section 4.4)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.merge import BestResults, ScannedPart
from ragorder.pipelining.search.running import RunningSearch, Visits
from ragorder.pipelining.search.scanner import PieceScanner, Rows
from ragorder.pipelining.staged._faiss import load_faiss
from ragorder.pipelining.staged._ivf import ClusterIndex

__all__ = ["ClusterScan", "FastShare", "IndexTiers", "TieredScanner"]

_logger = logging.getLogger("ragorder")

# A cluster in the tier stays unless others are used this much more: an exchange takes time.
_STAY = 1.1
_TRIALS = 8
# Indexes whose distances are to decoded vectors.
_DECODED = {"IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ"}


class ClusterScan(Protocol):
    """A fast tier for the vectors of some clusters. `put` and `scan` may run in two threads."""

    @property
    def metric(self) -> str:
        """ "L2" or "inner product"."""

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
    """Keeps the most used clusters in `fast`, with at most `capacity_bytes`.

        tiers = IndexTiers(TorchClusterScan("L2", "cuda"), capacity_bytes=4 << 30)
        search = ContinuousIVF(index, scanner=partial(TieredScanner, tiers))

    Clusters in the tier are scanned there while the cores scan the others, if measured costs say that this is faster.
    Clusters are exchanged every `every` pieces; the weight of a use halves after `half_life` pieces. For one
    `ContinuousIVF`. If `fast` raises, the cores continue alone. Call `reset` after vectors were exchanged for the same
    number of others.
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
        for name, value in (("capacity_bytes", capacity_bytes), ("every", every), ("half_life", half_life)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.capacity_bytes = capacity_bytes
        self.costs = ClusterCosts(1e-9)
        self.codes = 0
        self.fast_codes = 0
        self._fast = fast
        self._every = every
        self._decay = 0.5 ** (every / half_life)
        self._clock = clock
        self._index: ClusterIndex
        self._attached = False
        self._failed = False
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

    @property
    def held_bytes(self) -> int:
        return int(self._bytes[self._held].sum())

    def attach(self, index: ClusterIndex) -> None:
        """Use these tiers for an index. Raises TypeError if its vectors cannot be scanned elsewhere."""
        if self._attached:
            raise ValueError("these tiers belong to another search: make others")
        _check_decoded(index)
        if index.metric != self._fast.metric:
            raise ValueError(
                f"the fast tier compares by {self._fast.metric}, but the index by {index.metric or 'another metric'}"
            )
        self._index, self._attached = index, True

    def resize(self, sizes: NDArray[np.int64]) -> None:
        self.reset()
        dimensions = int(self._index.ivf.d)
        self._bytes = np.array([self._fast.bytes_of(size, dimensions) for size in sizes.tolist()], float)
        if len(self._uses) != len(sizes):
            self._uses = np.zeros(len(sizes))
        self._held = np.zeros(len(sizes), bool)

    def reset(self) -> None:
        """Empty the tier. Not during a search."""
        for cluster in np.flatnonzero(self._held).tolist():
            self._drop(cluster)
        self._to_load.clear()

    def start(self, visits: Visits, queries: NDArray[np.float32], k: int, slow_s: float) -> FastShare | None:
        """Scan a piece's visits to clusters in the tier; return None if the cores, in `slow_s`, are faster.

        The caller must call `end`.
        """
        np.add.at(self._uses, visits.clusters, 1)
        self.codes += int(visits.codes.sum())
        chosen = self._held[visits.clusters]
        if self._to_load and not self._failed:
            self._stop_loading = False
            self._loading = self._threads.submit(self._load)
        if self._failed or not chosen.any():
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
            try:
                loading.result()
            except Exception as error:
                self.fail(error)
        self._pieces += 1
        if self._pieces % self._every == 0 and not self._failed:
            self._exchange()

    def fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            _logger.warning("the fast tier of the index failed and is not used any more: %s", type(error).__name__)
        self._to_load.clear()
        held = np.flatnonzero(self._held).tolist()
        self._held[:] = False
        for cluster in held:
            with suppress(Exception):
                self._fast.drop(cluster)

    def close(self) -> None:
        self._threads.shutdown()

    def _scan(self, visits: Visits, queries: NDArray[np.float32], k: int) -> tuple[ScannedPart, float]:
        rows, clusters, _ = visits.padded()
        start_s = self._clock()
        distances, locations = self._fast.scan(queries[rows], k, clusters)
        seconds = self._clock() - start_s
        self.costs.learn(int(visits.codes.sum()), seconds)
        return ScannedPart(
            rows, -distances if self._index.similarity else distances, locations, locations=True
        ), seconds

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
            self._drop(cluster)
        self._to_load = deque(cluster for cluster in chosen.tolist() if not self._held[cluster])
        self._uses *= self._decay
        # Costs change with other work of the device.
        self._trials = self.costs.calls + 1

    def _drop(self, cluster: int) -> None:
        self._held[cluster] = False
        try:
            self._fast.drop(cluster)
        except Exception as error:
            self.fail(error)


class TieredScanner(PieceScanner):
    """Has `tiers` scan the clusters that they hold, while the cores scan a piece's others. For one `ContinuousIVF`."""

    def __init__(
        self, tiers: IndexTiers, index: ClusterIndex, cores: int, costs: ClusterCosts, clock: Callable[[], float]
    ) -> None:
        tiers.attach(index)
        super().__init__(index, cores, costs, clock)
        self._tiers = tiers
        self._sizes: NDArray[np.int64] | None = None

    def scan(self, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64]) -> list[BestResults]:
        if sizes is not self._sizes:
            self._tiers.resize(sizes)
            self._sizes = sizes
        return super().scan(piece, sizes)

    def close(self) -> None:
        super().close()
        self._tiers.close()

    def _whole_alone(self, piece: Sequence[tuple[RunningSearch, int]]) -> BestResults | None:
        return None

    def _parts(self, visits: Visits, rows: Rows) -> list[ScannedPart]:
        if rows.selector is not None:
            return super()._parts(visits, rows)
        core_s = int(visits.codes.sum()) * self.costs.code_s / self._cores
        share = self._tiers.start(visits, rows.queries, rows.kept, core_s)
        before_s = self.scan_s
        try:
            if share is None:
                return super()._parts(visits, rows)
            parts = super()._parts(visits.part(~share.chosen), rows)
            try:
                part, seconds = share.part.result()
            except Exception as error:
                self._tiers.fail(error)
                return parts + super()._parts(share.visits, rows)
            self.scan_s = max(self.scan_s, before_s + seconds)
            return [*parts, part]
        finally:
            if share is not None:
                wait([share.part])
            self._tiers.end()


def _check_decoded(index: ClusterIndex) -> None:
    name = type(index.ivf).__name__
    if name not in _DECODED or getattr(index.ivf, "polysemous_ht", False):
        raise TypeError(f"{name} cannot have tiers: use IndexIVFFlat, IndexIVFScalarQuantizer, or plain IndexIVFPQ")


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
