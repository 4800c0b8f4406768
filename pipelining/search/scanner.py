"""Scan of a piece's clusters on several cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.merge import BestResults, ScannedPart
from ragorder.pipelining.search.running import RunningSearch, Visits
from ragorder.pipelining.staged._faiss import load_faiss
from ragorder.pipelining.staged._ivf import ClusterIndex

# Cost of a share for another thread.
_HAND_S = 3e-5


class Rows(NamedTuple):
    """A piece's queries, and what is kept of each."""

    queries: NDArray[np.float32]
    kept: int
    locations: bool
    selector: Any = None


class PieceScanner:
    """Deals a piece's clusters to cores by codes. `scan_s`: the last piece's time in FAISS."""

    def __init__(self, index: ClusterIndex, cores: int, costs: ClusterCosts, clock: Callable[[], float]) -> None:
        self.costs = costs
        self.scan_s = 0.0
        self._index = index
        self._cores = cores
        self._clock = clock
        self._helpers: ThreadPoolExecutor | None = None
        if cores > 1:
            self._helpers = ThreadPoolExecutor(cores - 1, "ragorder-scan", lambda: load_faiss().omp_set_num_threads(1))

    def scan(self, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64]) -> list[BestResults]:
        if (whole := self._whole_alone(piece)) is not None:
            return [whole]
        searches = [search for search, _ in piece]
        best = BestResults.stack([search.best for search in searches])
        best = self._merge(best, self._scan(piece, sizes, best.keys.shape[1]))
        bounds = pairwise(np.cumsum([0, *(len(search.queries) for search in searches)]).tolist())
        return [best.part(start, stop, search.kept) for search, (start, stop) in zip(searches, bounds, strict=True)]

    def scan_visits(self, visits: Visits, queries: NDArray[np.float32], best: BestResults) -> BestResults:
        self.scan_s = 0.0
        return self._merge(best, self._parts(visits, Rows(queries, best.keys.shape[1], locations=False)))

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)

    def _whole_alone(self, piece: Sequence[tuple[RunningSearch, int]]) -> BestResults | None:
        search, stop = piece[0]
        if len(piece) > 1 or search.done or stop < search.total or self._cores > 1:
            return None
        locations = search.history is not None and search.selector is None
        start_s = self._clock()
        distances, found = self._index.scan(
            search.queries, search.kept, search.clusters, search.coarse, selector=search.selector, locations=locations
        )
        self.scan_s = self._clock() - start_s
        self.costs.learn(search.codes[-1], self.scan_s)
        ids = found
        if locations:
            ids = np.full_like(found, -1)
            ids[found != -1] = self._index.ids_at(found[found != -1])
        keys = -distances if self._index.similarity else distances
        if not locations:
            return BestResults(keys, ids, np.full_like(found, -1))
        # FAISS has ordered equals by location, but those of a search by id.
        order = np.lexsort((-ids if self._index.similarity else ids, keys), axis=-1)
        return BestResults(
            np.take_along_axis(keys, order, axis=1),
            np.take_along_axis(ids, order, axis=1),
            np.take_along_axis(found, order, axis=1),
        )

    def _scan(
        self, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64], kept: int
    ) -> list[ScannedPart]:
        visits = Visits.of(piece, sizes)
        self.scan_s = 0.0
        if not len(visits.rows):
            return []
        queries = np.concatenate([search.queries for search, _ in piece])
        locations = any(search.history is not None for search, _ in piece)
        parts: list[ScannedPart] = []
        for selector, share in _by_selector(piece, visits):
            parts += self._parts(share, Rows(queries, kept, locations and selector is None, selector))
        return parts

    def _parts(self, visits: Visits, rows: Rows) -> list[ScannedPart]:
        own, *others = visits.deal(shares_of(int(visits.codes.sum()), self._cores, self.costs)) or (None,)
        if own is None:
            return []
        futures: list[Future[tuple[ScannedPart, int, float]]] = []
        try:
            if self._helpers is not None:
                futures = [self._helpers.submit(self._share, share, rows) for share in others]
            done = [self._share(own, rows)]
        finally:
            # FAISS writes into arrays that belong to these calls.
            if futures:
                wait(futures)
        done.extend(future.result() for future in futures)
        for _, codes, seconds in done:
            self.costs.learn(codes, seconds)
        self.scan_s += max(seconds for _, _, seconds in done)
        return [part for part, _, _ in done]

    def _share(self, visits: Visits, of: Rows) -> tuple[ScannedPart, int, float]:
        rows, clusters, coarse = visits.padded()
        start_s = self._clock()
        distances, ids = self._index.scan(
            of.queries[rows], of.kept, clusters, coarse, selector=of.selector, locations=of.locations
        )
        seconds = self._clock() - start_s
        keys = -distances if self._index.similarity else distances
        return ScannedPart(rows, keys, ids, of.locations), int(visits.codes.sum()), seconds

    def _merge(self, best: BestResults, parts: Sequence[ScannedPart]) -> BestResults:
        rows, keys, ids, locations = [], [], [], []
        for part in parts:
            row, column = np.nonzero(best.better(part))
            found = part.ids[row, column]
            rows.append(part.rows[row])
            keys.append(part.keys[row, column])
            ids.append(self._index.ids_at(found) if part.locations else found)
            locations.append(found if part.locations else np.full(len(found), -1))
        if not sum(map(len, rows)):
            return best
        new = BestResults(np.concatenate(keys), np.concatenate(ids), np.concatenate(locations))
        return best.merge(np.concatenate(rows), new, similarity=self._index.similarity)


def shares_of(codes: int, cores: int, costs: ClusterCosts) -> int:
    """Return the cores n for a piece, the minimum of work / n + n * (cost of a share)."""
    work_s = codes * costs.code_s
    return max(1, min(cores, int(work_s / max(costs.call_s, _HAND_S)), int(math.sqrt(work_s / _HAND_S))))


def _by_selector(piece: Sequence[tuple[RunningSearch, int]], visits: Visits) -> Iterator[tuple[Any, Visits]]:
    """Group visits by selector: a call of FAISS has one."""
    selectors = [search.selector for search, _ in piece]
    plain = np.array([selector is None for selector in selectors])
    if plain.all():
        yield None, visits
        return
    owners = np.repeat(np.arange(len(piece)), [len(search.queries) for search, _ in piece])[visits.rows]
    for selector, chosen in (
        (None, plain[owners]),
        *((selectors[number], owners == number) for number in np.flatnonzero(~plain).tolist()),
    ):
        if chosen.any():
            yield selector, visits.part(chosen)


@contextmanager
def one_thread() -> Iterator[None]:
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
