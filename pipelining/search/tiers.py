"""Fast tier for the most used clusters of an index (HedraRAG section 4.4)."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.merge import ScannedPart
from ragorder.pipelining.search.running import Visits
from ragorder.pipelining.staged._ivf import ClusterIndex

__all__ = ["ClusterScan", "FastShare", "IndexTiers", "TierGains"]

_logger = logging.getLogger("ragorder")

# A cluster in the tier stays unless others are used this much more: an exchange takes time.
_STAY = 1.1
_TRIALS = 8


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


class TierGains(NamedTuple):
    """Seconds that the tier is expected to save a search (inf: not measured yet).

    `scan_s` with its current clusters, `prefetch_s` more if it had all clusters of the search.
    """

    hit_share: float
    scan_s: float
    prefetch_s: float


@dataclass(frozen=True, slots=True)
class FastShare:
    visits: Visits
    chosen: NDArray[np.bool_]
    part: Future[tuple[ScannedPart, float]]


class IndexTiers:
    """Keeps the most used clusters in `fast`, with at most `capacity_bytes`.

        search = ContinuousIVF(index, tiers=IndexTiers(TorchClusterScan("L2", "cuda"), capacity_bytes=4 << 30))

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
        self._held_share = RunningMean(arithmetic_start=True)
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

    def gains(self, codes: float | None, slow_s: float) -> TierGains:
        """Return the gains of a search of `codes` vectors (None: unknown) that takes the cores `slow_s`."""
        if self._failed:
            return TierGains(self.hit_share, 0.0, 0.0)
        if codes is None or self.costs.calls < self._trials:
            return TierGains(self.hit_share, math.inf, math.inf)
        held = self._held_share.value or 0.0
        # Both scan at the same time; if the tier were slower than the cores, they would scan all.
        now_s = min(slow_s, max((1 - held) * slow_s, self.costs.seconds(held * codes))) if held else slow_s
        return TierGains(self.hit_share, slow_s - now_s, now_s - self.costs.seconds(codes))

    def attach(self, index: ClusterIndex) -> None:
        """Use these tiers for an index. Raises TypeError if its vectors cannot be scanned elsewhere."""
        if self._attached:
            raise ValueError("these tiers belong to another search: make others")
        index.check_decoded()
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

    def start(
        self, visits: Visits, queries: NDArray[np.float32], k: int, slow_s: float, fast: NDArray[np.bool_] | None = None
    ) -> FastShare | None:
        """Scan a piece's visits to clusters in the tier; return None if the cores, in `slow_s`, are faster.

        The caller must call `end`.
        """
        np.add.at(self._uses, visits.clusters, 1)
        total = int(visits.codes.sum())
        self.codes += total
        chosen = self._held[visits.clusters]
        self._held_share.add(int(visits.codes[chosen].sum()) / total if total else 0.0)
        if fast is not None:
            chosen = chosen & fast[visits.rows]
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

    def prefetch(self, clusters: NDArray[np.int64]) -> None:
        """Load clusters that a search will visit, nearest first. Between two pieces."""
        if self._failed:
            return
        wanted = clusters[(clusters >= 0) & ~self._held[clusters]]
        wanted = wanted[np.isin(wanted, np.array(self._to_load, np.int64), invert=True)]
        stays = np.isin(np.arange(len(self._held)), clusters)
        least = deque(sorted(np.flatnonzero(self._held & ~stays).tolist(), key=self._uses.__getitem__))
        free = self.capacity_bytes - self.held_bytes - int(self._bytes[list(self._to_load)].sum())
        for cluster in wanted.tolist():
            while least and free < self._bytes[cluster] and self._uses[least[0]] <= self._uses[cluster] + 1:
                free += int(self._bytes[least[0]])
                self._drop(least.popleft())
            if free < self._bytes[cluster]:
                return
            free -= int(self._bytes[cluster])
            self._to_load.append(cluster)

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
            self._fast.put(cluster, self._index.cluster_vectors(cluster))
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
