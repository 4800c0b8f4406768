"""Engines on a virtual clock, by measured costs: the rules of `ContinuousIVF` are its own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.hedra.partition.playing import VirtualClock
from ragorder.benchmarks.hedra.partition.sharing import share_equally
from ragorder.eval.virtual.costs import ScanCosts
from ragorder.pipelining.search import Budget, SearchHandle
from ragorder.pipelining.search.continuous import fill
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.request import SearchRequest
from ragorder.pipelining.search.running import RunningSearch, Visits
from ragorder.pipelining.search.scanner import shares_of

__all__ = ["PAPER_DIMENSIONS", "PAPER_NPROBE", "VirtualBatches", "VirtualIndex", "VirtualPieces", "paper_sizes"]

_PAPER_VECTORS, _PAPER_CLUSTERS = 38_000_000, 4096
PAPER_DIMENSIONS, PAPER_NPROBE = 1024, 256
_SPREAD = 0.4
_ONE_ROW = np.zeros((1, 1), np.float32)


class VirtualIndex:
    """Clusters of `sizes` codes, of which each search visits `nprobe` at random."""

    def __init__(self, sizes: NDArray[np.int64], nprobes: Sequence[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        # The last place is that of cluster -1: none.
        self.sizes = np.append(sizes, 0)
        self.visits = [rng.choice(len(sizes), nprobe, replace=False) for nprobe in nprobes]
        self.nprobes = nprobes

    @property
    def mean_codes(self) -> float:
        return float(np.mean([self.sizes[visits].sum() for visits in self.visits]))


def paper_sizes() -> NDArray[np.int64]:
    """Of HedraRAG's clusters; how they differ is not in the paper: log-normally here."""
    relative = np.random.default_rng(0).lognormal(0, _SPREAD, _PAPER_CLUSTERS)
    sizes: NDArray[np.int64] = np.round(relative * _PAPER_VECTORS / relative.sum()).astype(np.int64)
    return sizes


class VirtualBatches:
    """See `RealBatches`."""

    def __init__(
        self, index: VirtualIndex, costs: ScanCosts, cores: int, clock: VirtualClock, *, by_clusters: bool
    ) -> None:
        self._index, self._costs, self._cores, self._clock = index, costs, cores, clock
        self._by_clusters = by_clusters
        self._waiting: list[int] = []

    def submit(self, number: int) -> None:
        self._waiting.append(number)

    def step(self, end: Callable[[int], None]) -> bool:
        batch, self._waiting = self._waiting, []
        for nprobe in dict.fromkeys(self._index.nprobes[number] for number in batch):
            numbers = [number for number in batch if self._index.nprobes[number] == nprobe]
            self._clock.spend(self._seconds(numbers))
            for number in numbers:
                end(number)
        return bool(batch)

    def _seconds(self, numbers: Sequence[int]) -> float:
        codes = [self._index.sizes[self._index.visits[number]] for number in numbers]
        if self._by_clusters:
            return sum(self._costs.scan_seconds(_makespan(sizes.tolist(), self._cores)) for sizes in codes)
        shares = np.array_split(np.array([sizes.sum() for sizes in codes]), min(self._cores, len(codes)))
        return self._costs.scan_seconds(max(float(share.sum()) for share in shares))


def _makespan(sizes: list[int], cores: int) -> int:
    """Of clusters that go one by one to the next free core (OpenMP's dynamic schedule)."""
    busy = [0] * cores
    for size in sizes:
        heapreplace(busy, busy[0] + size)
    return max(busy)


class VirtualPieces:
    def __init__(self, index: VirtualIndex, costs: ScanCosts, cores: int, clock: VirtualClock, policy: str) -> None:
        self._index, self._cores, self._clock, self._policy = index, cores, clock, policy
        self._costs = ClusterCosts(costs.code_s, costs.call_s)
        self._measured = costs
        self._search_s = self._costs.seconds(index.mean_codes)
        self._cluster_s = costs.code_s * float(index.sizes[:-1].mean())
        self._budget = Budget()
        self._budget.learn(costs.overhead_seconds(1))
        self._running: dict[RunningSearch, int] = {}

    def submit(self, number: int) -> None:
        visits = self._index.visits[number]
        search = RunningSearch(
            SearchHandle(None), SearchRequest(_ONE_ROW, 1, len(visits), 1), submitted_s=self._clock.now()
        )
        search.clusters, search.coarse = visits[None], np.zeros((1, len(visits)), np.float32)
        search.total, search.codes = len(visits), [0, *np.cumsum(self._index.sizes[visits]).tolist()]
        self._running[search] = number

    def step(self, end: Callable[[int], None]) -> bool:
        if not self._running:
            return False
        piece = self._piece(list(self._running))
        visits = Visits.of(piece, self._index.sizes)
        parts = visits.deal(shares_of(int(visits.codes.sum()), self._cores, self._costs))
        self._budget.learn(self._measured.overhead_seconds(len(parts)))
        self._clock.spend(self._measured.piece_seconds([int(part.codes.sum()) for part in parts]))
        for search, stop in piece:
            search.done = stop
            if stop == search.total:
                end(self._running.pop(search))
        return True

    def _piece(self, running: list[RunningSearch]) -> list[tuple[RunningSearch, int]]:
        code_s = self._costs.code_s
        if self._policy == "equal shares":
            seconds = self._budget.limit(self._search_s, 0, self._cores).seconds
            return share_equally(running, seconds, cores=self._cores, code_s=code_s)
        limit = self._budget.limit(self._search_s, len(running) - 1, self._cores, self._cluster_s)
        order = "shortest" if self._policy == "shortest first" else "oldest"
        return fill(running, limit, cores=self._cores, code_s=code_s, order=order, now_s=self._clock.now())  # type: ignore[arg-type]
