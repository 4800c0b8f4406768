"""Engines on a real FAISS index."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.hedra.partition.sharing import EqualShares
from ragorder.benchmarks.hedra.staging.measuring import clustered
from ragorder.eval.virtual.costs import ScanCosts
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, SearchHandle
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = [
    "RealBatches",
    "RealPieces",
    "build_index",
    "measure_costs",
    "piece_cpu_seconds",
    "pieces_of",
    "search_seconds",
]

Vectors = NDArray[np.float32]
_K = 1
_IN_FLIGHT, _PIECES = 100, 600
_ONE_CLUSTER_S = 1e-30


class _WatchedBudget(Budget):
    def __init__(self, overhead_s: float | None = None) -> None:
        super().__init__(overhead_s)
        self.seen_s: list[float] = []

    def learn(self, overhead_s: float) -> None:
        super().learn(overhead_s)
        self.seen_s.append(overhead_s)


def build_index(vectors: int, dimensions: int) -> Any:
    faiss = load_faiss()
    stored = clustered(vectors, dimensions, clusters=vectors // 50, seed=0)
    clusters = round(4 * vectors**0.5)
    index = faiss.index_factory(dimensions, f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = 4
    index.train(stored[:: max(1, vectors // (clusters * 40))])
    index.add(stored)
    return index


def search_seconds(index: Any, queries: Vectors, nprobes: Sequence[int]) -> float:
    """Of a whole search on one core, the mean of each nprobe's median."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(1)
    sums = 0.0
    for nprobe in sorted(set(nprobes)):
        params, times = faiss.SearchParametersIVF(nprobe=nprobe), []
        for row in range(min(15, len(queries))):
            start_s = time.perf_counter()
            index.search(queries[row : row + 1], _K, params=params)
            times.append(time.perf_counter() - start_s)
        sums += median(times) * nprobes.count(nprobe)
    return sums / len(nprobes)


def measure_costs(index: Any, queries: Vectors) -> ScanCosts:
    budget = _WatchedBudget()
    search = ContinuousIVF(index, cores=1, budget=budget, thread=False)
    for query in queries:
        search.submit(query, _K).result()
    with ThreadPoolExecutor(1) as pool:
        times = []
        for _ in range(200):
            start_s = time.perf_counter()
            pool.submit(int).result()
            times.append(time.perf_counter() - start_s)
    return ScanCosts(search.costs.code_s, search.costs.call_s, median(budget.seen_s), median(times))


def piece_cpu_seconds(index: Any, queries: Vectors) -> float:
    """CPU time of a piece of one cluster beside its scan, with 100 searches in flight: the median."""
    budget = _WatchedBudget(_ONE_CLUSTER_S)
    with ContinuousIVF(index, cores=1, budget=budget, thread=False, clock=time.thread_time) as search:
        for number in range(_IN_FLIGHT + 1):
            search.submit(queries[number % len(queries)], _K)
        while search.pieces < _PIECES and search.advance():
            pass
    return median(budget.seen_s[_PIECES // 2 :])


class RealBatches:
    """All that wait, in one call of FAISS for each nprobe; what comes later waits for the end. FAISS deals out whole
    queries, or with `by_clusters` one query after another to all cores."""

    def __init__(
        self, index: Any, queries: Vectors, nprobes: Sequence[int], cores: int, *, by_clusters: bool = False
    ) -> None:
        self._index, self._queries, self._nprobes = index, queries, nprobes
        self._cores, self._mode = cores, int(by_clusters)
        self._waiting: list[int] = []

    def submit(self, number: int) -> None:
        self._waiting.append(number)

    def step(self, end: Callable[[int], None]) -> bool:
        faiss = load_faiss()
        batch, self._waiting = self._waiting, []
        faiss.omp_set_num_threads(self._cores)
        self._index.parallel_mode = self._mode
        try:
            for nprobe in dict.fromkeys(self._nprobes[number] for number in batch):
                numbers = [number for number in batch if self._nprobes[number] == nprobe]
                self._index.search(self._queries[numbers], _K, params=faiss.SearchParametersIVF(nprobe=nprobe))
                for number in numbers:
                    end(number)
        finally:
            self._index.parallel_mode = 0
            faiss.omp_set_num_threads(1)
        return bool(batch)


class RealPieces:
    def __init__(self, search: ContinuousIVF, queries: Vectors, nprobes: Sequence[int]) -> None:
        self._search, self._queries, self._nprobes = search, queries, nprobes
        self._running: dict[int, SearchHandle] = {}

    def submit(self, number: int) -> None:
        faiss = load_faiss()
        params = faiss.SearchParametersIVF(nprobe=self._nprobes[number])
        self._running[number] = self._search.submit(self._queries[number], _K, params=params)

    def step(self, end: Callable[[int], None]) -> bool:
        worked = self._search.advance()
        for number in [number for number, handle in self._running.items() if handle.done]:
            del self._running[number]
            end(number)
        return worked


def pieces_of(index: Any, policy: str, cores: int) -> ContinuousIVF:
    if policy == "equal shares":
        return EqualShares(index, cores=cores, thread=False)
    return ContinuousIVF(index, cores=cores, order="shortest" if policy == "shortest first" else "oldest", thread=False)
