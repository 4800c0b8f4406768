"""Continuous IVF search (HedraRAG 4.2)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Literal, Self, get_args

import numpy as np

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.search.costs import Budget, ClusterCosts, PieceLimit
from ragorder.pipelining.search.handle import SearchHandle
from ragorder.pipelining.search.merge import BestResults
from ragorder.pipelining.search.request import History, SearchRequest, one_row
from ragorder.pipelining.search.running import RunningSearch
from ragorder.pipelining.search.scanner import PieceScanner, one_thread
from ragorder.pipelining.staged import Stage
from ragorder.pipelining.staged._faiss import load_faiss
from ragorder.pipelining.staged._ivf import ClusterIndex, read_nprobe

PieceOrder = Literal["oldest", "shortest"]

# A search that has waited ten seconds goes before one that is shorter by one second.
_AGEING = 0.1


def fill(
    searches: Sequence[RunningSearch], limit: PieceLimit, *, cores: int, code_s: float, order: PieceOrder, now_s: float
) -> list[tuple[RunningSearch, int]]:
    """Return a piece's searches, due ones first, each with the cluster before which its part ends."""
    left = limit.seconds * cores / code_s
    piece: list[tuple[RunningSearch, int]] = []
    if order == "shortest":
        searches = sorted(searches, key=lambda each: each.left_codes * code_s - _AGEING * (now_s - each.submitted_s))
    due = (search for search in searches if search.handle.due)
    ahead = (search for search in searches if not search.handle.due)
    for search in chain(due, ahead):
        if piece and limit.whole and left < search.left_codes / 2:
            break
        stop = search.end_of_piece(left, whole=limit.whole)
        piece.append((search, stop))
        left -= search.codes[stop] - search.codes[search.done]
        if left <= 0:
            break
    return piece


# Measured seconds for a code of one byte, and for a dimension as FAISS compares it.
_BYTE_S, _DIMENSION_S = 1e-10, 4e-10


class ContinuousIVF:
    """Searches an IVF index for many callers at once, one piece of a few clusters after another.

        search = ContinuousIVF(index, nprobe=64)
        for stage in search.search(queries, k=5): ...          # a StagedSearch, from any thread
        handle = search.submit(query, k=5, history=history)    # one query; handle.stages(), .result(), .cancel()

    - `index`: as for `StagedIVF`, with its TypeError
    - `nprobe`, `cores`: by default the index's and FAISS's own
    - `order`: the "oldest" search first, or the one with the "shortest" rest
    - `patience`: end a search after this many clusters without a change
    - `thread`: scan in a thread; otherwise in callers that wait for a stage or call `advance`

    Without `patience` the last stage equals `index.search`, ties included. The index must not change during a search.
    """

    def __init__(
        self,
        index: Any,
        *,
        nprobe: int | None = None,
        cores: int | None = None,
        order: PieceOrder = "oldest",
        budget: Budget | None = None,
        patience: int | None = None,
        thread: bool = True,
        scanner: Callable[[ClusterIndex, int, ClusterCosts, Callable[[], float]], PieceScanner] = PieceScanner,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._index = ClusterIndex(index, "ContinuousIVF")
        if not self._index.ivf.is_trained:
            raise ValueError(f"the {type(self._index.ivf).__name__} is not trained: train it, and add its vectors")
        self._nprobe = read_nprobe(nprobe)
        cores = load_faiss().omp_get_max_threads() if cores is None else cores
        if cores < 1:
            raise ValueError(f"cores must be at least 1, got {cores}")
        if order not in get_args(PieceOrder):
            raise ValueError(f"order must be 'oldest' or 'shortest', got {order!r}")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 cluster, or None, got {patience}")
        self.budget = budget or Budget()
        self.costs = ClusterCosts(_BYTE_S * self._index.ivf.code_size + _DIMENSION_S * self._index.ivf.d)
        self.pieces = 0
        self._cores, self._order, self._patience, self._clock = cores, order, patience, clock
        self._scanner = scanner(self._index, cores, self.costs, clock)
        self._sizes = np.zeros(1, np.int64)
        self._sized_at = -1
        self._search_codes = RunningMean(arithmetic_start=True)
        self._cluster_codes = RunningMean(arithmetic_start=True)
        self._advancing = threading.Lock()
        self._running: list[RunningSearch] = []
        self._unprepared: deque[RunningSearch] = deque()
        self._lock = threading.Lock()
        self._joining: list[RunningSearch] = []
        self._closed = self._driven = False
        self._driver = ThreadPoolExecutor(1, "ragorder-search") if thread else None
        # Called by a caller that waits for a stage.
        self._wait_by: Callable[[], object] | None = None if thread else self.advance

    @property
    def similarity(self) -> bool:
        return self._index.similarity

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._unprepared) + len(self._joining)

    def search(self, queries: Any, k: int, *, params: Any = None) -> Iterator[Stage]:
        """See `StagedSearch.search`. `params`: a faiss.SearchParametersIVF with nprobe and selector."""
        request = self._read(queries, k, params)

        def stages() -> Iterator[Stage]:
            handle = self._join(request)
            try:
                yield from handle.stages()
            finally:
                handle.cancel()

        return stages()

    def search_async(self, queries: Any, k: int, *, params: Any = None) -> AsyncGenerator[Stage, None]:
        request = self._read(queries, k, params)

        async def stages() -> AsyncGenerator[Stage, None]:
            handle = self._join(request)
            try:
                async for stage in handle.stages_async():
                    yield stage
            finally:
                handle.cancel()

        return stages()

    def submit(
        self,
        query: Any,
        k: int,
        *,
        history: History | None = None,
        due: bool = True,
        whole: bool = False,
        params: Any = None,
    ) -> SearchHandle:
        """Start a search for one query, (dimensions,) or (1, dimensions).

        - `history`: the request's earlier searches, to which this one is added; not with a selector
        - `due=False`: speculative, only while due searches leave cores idle
        """
        return self._join(self._read(one_row(query), k, params, history), due=due, whole=whole)

    def advance(self) -> bool:
        """Scan one piece; return False if no search is left. FAISS's errors end their search."""
        with self._advancing, one_thread():
            started_s = self._clock()
            coarse_s = self._let_in()
            if not self._running:
                return False
            self._publish(self._scan(self._next_piece()))
            self.pieces += 1
            self.budget.learn(self._clock() - started_s - coarse_s - self._scanner.scan_s)
            return True

    def close(self) -> None:
        """Cancel searches; later ones raise RuntimeError."""
        with self._lock:
            self._closed = True
        self._end_all(SearchHandle.cancel)
        self._scanner.close()
        if self._driver is not None:
            self._driver.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, queries: Any, k: int, params: Any, history: History | None = None) -> SearchRequest:
        return SearchRequest.read(self._index, queries, k, self._nprobe, params, history)

    def _join(self, request: SearchRequest, *, due: bool = True, whole: bool = False) -> SearchHandle:
        handle = SearchHandle(self._wait_by, due=due, whole=whole)
        self._enter(RunningSearch(handle, request, self._patience, self._clock()))
        return handle

    def _enter(self, search: RunningSearch) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("this search is closed")
            if self._driver is not None and not self._driven:
                self._driver.submit(self._drive)
                self._driven = True
            self._joining.append(search)

    def _drive(self) -> None:
        while True:
            try:
                while self.advance():
                    pass
            except Exception as error:
                # A caller must not wait for a search that nothing scans.
                self._end_all(partial(SearchHandle.fail, error=error))
            with self._lock:
                if not self._joining:
                    self._driven = False
                    return

    def _end_all(self, end: Callable[[SearchHandle], object]) -> None:
        with self._advancing:
            self._take_joining()
            for search in (*self._running, *self._unprepared):
                end(search.handle)
            self._running = []
            self._unprepared.clear()

    def _take_joining(self) -> None:
        with self._lock:
            self._unprepared += self._joining
            self._joining = []

    def _let_in(self) -> float:
        self._take_joining()
        if any(search.handle.done for search in self._running):
            self._leave()
        if not self._unprepared:
            return 0.0
        started_s = self._clock()
        self._measure_sizes()
        limit = self._limit()
        while self._unprepared:
            self._prepare(self._unprepared.popleft())
            # Of many new searches only the last ones wait.
            if self._running and self._clock() - started_s > limit.seconds:
                break
        return self._clock() - started_s

    def _leave(self) -> None:
        for search in self._running:
            if search.handle.cancelled and not search.handle.due:
                # Results of a cancelled speculative search are only a hint for the due one.
                with suppress(Exception):
                    search.store_past(self._index)
        self._running = [search for search in self._running if not search.handle.done]

    def _prepare(self, search: RunningSearch) -> None:
        if search.handle.done:
            return
        try:
            search.prepare(self._index, self._sizes)
        except Exception as error:
            search.handle.fail(error)
        else:
            self._search_codes.add(search.codes[-1])
            self._cluster_codes.add(search.codes[-1] / max(1, search.clusters.size))
            self._running.append(search)

    def _measure_sizes(self) -> None:
        # The last element is for cluster -1, which means no cluster.
        ivf = self._index.ivf
        if self._sized_at != ivf.ntotal:
            self._sizes = np.fromiter((*map(ivf.get_list_size, range(ivf.nlist)), 0), np.int64, ivf.nlist + 1)
            self._sized_at = ivf.ntotal

    def _limit(self) -> PieceLimit:
        due = sum(search.handle.due for search in self._running)
        search_s = self.costs.seconds(self._search_codes.value or 0.0)
        cluster_s = self.costs.code_s * (self._cluster_codes.value or 0.0)
        return self.budget.limit(search_s, max(0, due - 1), self._cores, cluster_s)

    def _next_piece(self) -> list[tuple[RunningSearch, int]]:
        limit, code_s = self._limit(), self.costs.code_s
        return fill(self._running, limit, cores=self._cores, code_s=code_s, order=self._order, now_s=self._clock())

    def _publish(self, found: list[tuple[RunningSearch, int, BestResults]]) -> None:
        ended = set()
        for search, stop, best in found:
            try:
                if search.advance(stop, best):
                    ended.add(search)
                    search.finish(self._index)
                else:
                    search.publish(self._index)
            except Exception as error:
                ended.add(search)
                search.handle.fail(error)
        self._running = [search for search in self._running if search not in ended]

    def _scan(self, piece: list[tuple[RunningSearch, int]]) -> list[tuple[RunningSearch, int, BestResults]]:
        try:
            found = self._scanner.scan(piece, self._sizes)
        except Exception as error:
            if len(piece) == 1:
                piece[0][0].handle.fail(error)
                return []
            # One of them caused the error.
            return [each for search in piece for each in self._scan([search])]
        return [(search, stop, best) for (search, stop), best in zip(piece, found, strict=True)]
