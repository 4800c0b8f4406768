"""Engines that search in batches or in pieces, on a real and on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heapreplace
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.common.virtual.costs import ScanCosts
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, SearchHandle
from ragorder.pipelining.search.continuous import fill
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.request import SearchRequest
from ragorder.pipelining.search.running import RunningSearch, Visits
from ragorder.pipelining.search.scanner import shares_of
from ragorder.pipelining.staged._faiss import load_faiss


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep_until(self, at_s: float) -> None: ...


class RealClock:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start_s

    def sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now()))


class VirtualClock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)

    def spend(self, seconds: float) -> None:
        self._now_s += seconds


class System(Protocol):
    """An engine for searches 0, 1, 2, … that works when it is told to."""

    def submit(self, number: int) -> None: ...

    def step(self, end: Callable[[int], None]) -> bool:
        """Work for a while, and `end` each search at the moment it is final. False: there is none."""


def play(system: System, arrivals_s: Sequence[float], clock: Clock) -> list[float]:
    """Seconds from each search's arrival to its end. What arrives during a step joins after it."""
    ended = [0.0] * len(arrivals_s)
    left = len(arrivals_s)
    following = 0

    def end(number: int) -> None:
        nonlocal left
        ended[number] = clock.now()
        left -= 1

    while left:
        while following < len(arrivals_s) and arrivals_s[following] <= clock.now():
            system.submit(following)
            following += 1
        if not system.step(end) and following < len(arrivals_s):
            clock.sleep_until(arrivals_s[following])
    return [end_s - arrival_s for end_s, arrival_s in zip(ended, arrivals_s, strict=True)]


def share_equally(
    searches: Sequence[RunningSearch], seconds: float, *, cores: int, code_s: float
) -> list[tuple[RunningSearch, int]]:
    """Return of each search the clusters that fit into its share of the piece, at least one."""
    codes = seconds * cores / code_s / max(1, len(searches))
    return [(search, search.end_of_piece(codes, whole=False)) for search in searches]


class EqualShares(ContinuousIVF):
    """With pieces of one length, however many wait."""

    def _next_piece(self) -> list[tuple[RunningSearch, int]]:
        search_s = self.costs.seconds(self._search_codes.value or 0.0)
        seconds = self.budget.limit(search_s, 0, self._cores).seconds
        return share_equally(self._running, seconds, cores=self._cores, code_s=self.costs.code_s)


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


class Batches:
    """All that wait, in one call for each nprobe."""

    def __init__(self, nprobes: Sequence[int]) -> None:
        self._nprobes = nprobes
        self._waiting: list[int] = []

    def submit(self, number: int) -> None:
        self._waiting.append(number)

    def step(self, end: Callable[[int], None]) -> bool:
        batch, self._waiting = self._waiting, []
        for nprobe in dict.fromkeys(self._nprobes[number] for number in batch):
            numbers = [number for number in batch if self._nprobes[number] == nprobe]
            self.search(numbers, nprobe)
            for number in numbers:
                end(number)
        return bool(batch)

    def search(self, numbers: Sequence[int], nprobe: int) -> None:
        raise NotImplementedError


class RealBatches(Batches):
    """In calls of FAISS; `by_clusters`: one query after another on all cores."""

    def __init__(
        self, index: Any, queries: Vectors, nprobes: Sequence[int], cores: int, *, by_clusters: bool = False
    ) -> None:
        super().__init__(nprobes)
        self._index, self._queries, self._cores, self._mode = index, queries, cores, int(by_clusters)

    def search(self, numbers: Sequence[int], nprobe: int) -> None:
        faiss = load_faiss()
        faiss.omp_set_num_threads(self._cores)
        self._index.parallel_mode = self._mode
        try:
            self._index.search(self._queries[numbers], _K, params=faiss.SearchParametersIVF(nprobe=nprobe))
        finally:
            self._index.parallel_mode = 0
            faiss.omp_set_num_threads(1)


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


_PAPER_VECTORS, _PAPER_CLUSTERS = 38_000_000, 4096
PAPER_DIMENSIONS, PAPER_NPROBE = 1024, 256
_SPREAD = 0.4
_ONE_ROW = np.zeros((1, 1), np.float32)


class VirtualIndex:
    """Clusters of `sizes` codes; each search visits `nprobe` at random."""

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


class VirtualBatches(Batches):
    """See `RealBatches`."""

    def __init__(
        self, index: VirtualIndex, costs: ScanCosts, cores: int, clock: VirtualClock, *, by_clusters: bool
    ) -> None:
        super().__init__(index.nprobes)
        self._index, self._costs, self._cores, self._clock = index, costs, cores, clock
        self._by_clusters = by_clusters

    def search(self, numbers: Sequence[int], nprobe: int) -> None:
        self._clock.spend(self._seconds(numbers))

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
