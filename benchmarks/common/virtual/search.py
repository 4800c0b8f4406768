"""Searches of an IVF index on a virtual clock: real results of a small index, times of a large one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.common.virtual.costs import SearchCosts
from ragorder.pipelining.search import Budget, ContinuousIVF
from ragorder.pipelining.search.costs import PieceLimit
from ragorder.pipelining.search.running import RunningSearch
from ragorder.pipelining.search.scanner import one_thread


class _DealtEvenly(Budget):
    """Without the rule that each core has 16 clusters in a piece: here any piece is dealt out evenly."""

    def limit(self, search_s: float, waiting: int, cores: int, cluster_s: float = 0.0) -> PieceLimit:
        return super().limit(search_s, waiting, cores)


class VirtualIVF(ContinuousIVF):
    """`ContinuousIVF` in an event loop: what is in a piece and what it finds is as ever, and the piece takes the time
    of the large index. Results are published at its end. `busy_s`: of the pieces."""

    def __init__(self, index: Any, costs: SearchCosts, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        budget = _DealtEvenly(costs.piece_s)
        super().__init__(index, cores=1, budget=budget, thread=False, clock=loop.time, **options)
        # One thread of this process scans; `fill` and the budget count the cores of the large index.
        self._cores = costs.busy_cores
        self._wait_by = None
        self._scale = costs.vectors_of(self._index.ivf)
        self.costs.call_s, self.costs.code_s = costs.call_s, costs.code_s * self._scale
        self.busy_s = 0.0
        self._large = costs
        self._loop = loop
        self._pieces: asyncio.Task[None] | None = None

    def _enter(self, search: RunningSearch) -> None:
        super()._enter(search)
        if self._pieces is None:
            self._pieces = self._loop.create_task(self._scan_pieces())

    async def _scan_pieces(self) -> None:
        while True:
            with one_thread():
                self._let_in()
            if not self._running:
                break
            piece = self._next_piece()
            codes = sum(search.codes[stop] - search.codes[search.done] for search, stop in piece)
            with one_thread():
                found = self._scan(piece)
            seconds = self._seconds(codes)
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            with one_thread():
                self._publish(found)
            self.pieces += 1
        self._pieces = None

    def _seconds(self, codes: float) -> float:
        """Of a piece whose scan reads this number of codes."""
        large = self._large
        return large.piece_seconds(large.dealt(codes * self._scale)) if codes else large.overhead_seconds(1)


class WholeSearches:
    """Searches that are not cut: each on a core of its own as one is free, or all that wait as one batch (`batched`),
    after which the next one begins. FAISS gives each search of a batch one core; `dealt`: all cores share its clusters.
    """

    def __init__(self, index: Any, costs: SearchCosts, *, batched: bool, dealt: bool = False) -> None:
        self._index = index
        self._costs = costs
        self._sizes = np.fromiter(map(index.get_list_size, range(index.nlist)), np.int64, index.nlist)
        self._scale = costs.vectors_of(index)
        self._cores = asyncio.Semaphore(costs.busy_cores)
        self._batched = batched
        self._dealt = dealt
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []
        self._searching: asyncio.Task[None] | None = None

    async def search(self, query: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Ids of the k nearest of one query, of shape (1, dimensions)."""
        _, clusters = self._index.quantizer.search(query, self._index.nprobe)
        codes = float(self._sizes[clusters].sum()) * self._scale
        if self._batched:
            await self._in_batch(codes)
        else:
            async with self._cores:
                await asyncio.sleep(self._costs.scan_seconds(codes))
        _, ids = self._index.search(query, k)
        found: NDArray[np.int64] = ids[0]
        return found

    async def _in_batch(self, codes: float) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self._waiting.append((codes, ended))
        if self._searching is None:
            self._searching = loop.create_task(self._search_batches())
        await ended

    async def _search_batches(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await asyncio.sleep(self._costs.batch_seconds([codes for codes, _ in batch], dealt=self._dealt))
            for _, ended in batch:
                if not ended.done():
                    ended.set_result(None)
        self._searching = None
