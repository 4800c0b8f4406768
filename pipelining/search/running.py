"""Search in progress, and visits to clusters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.handle import SearchHandle
from ragorder.pipelining.search.merge import BestResults
from ragorder.pipelining.search.request import PastSearch, SearchRequest
from ragorder.pipelining.staged import Stage
from ragorder.pipelining.staged._ivf import ClusterIndex


class RunningSearch:
    """Queries that advance together; `codes[i]`: vectors in their first i clusters."""

    def __init__(
        self, handle: SearchHandle, request: SearchRequest, patience: int | None = None, submitted_s: float = 0.0
    ) -> None:
        self.handle = handle
        self.queries = request.queries
        self.k = request.k
        self.history = request.history
        self.selector = request.selector
        self.submitted_s = submitted_s
        self.kept = (self.k if self.history is None else max(self.k, self.history.kept)) + 1
        self.done = 0
        self.total = 0
        self.codes: list[int] = []
        self.best = BestResults.none(len(self.queries), self.kept)
        self._past_best: BestResults | None = None
        self._request = request
        self._patience = patience
        self._changed_at = 0
        self._changed = False

    @property
    def left_codes(self) -> int:
        return self.codes[-1] - self.codes[self.done]

    @property
    def settled(self) -> int:
        return self.done - self._changed_at

    def prepare(self, index: ClusterIndex, sizes: NDArray[np.int64]) -> None:
        self.queries = index.core.transform_queries(self.queries)
        self.total = self._request.nprobe
        self._nearest = index.nearest_clusters(self.queries, self.total, self._request.slices)
        self.coarse, self.clusters = self._nearest
        past = None if self.history is None else self.history.similar(self.queries[0])
        if past is not None:
            order = past.order(self.clusters[0])
            self.clusters, self.coarse = self.clusters[:, order], self.coarse[:, order]
            self._past_best = past.results_in(self.queries[0], self.clusters[0])
            if self._past_best is not None and self._past_best.ids.shape[1] >= self.k:
                self.publish(index)
        self.codes = [0, *np.cumsum(sizes[self.clusters].sum(axis=0)).tolist()]

    def end_of_piece(self, codes: float, *, whole: bool) -> int:
        stop = self.total if whole or self.handle.whole else bisect_right(self.codes, self.codes[self.done] + codes) - 1
        if self.codes[-1] - self.codes[stop] < codes / 4:
            stop = self.total
        if self._patience is not None:
            # A run of clusters without change has the same bounds in every interleaving.
            stop = min(stop, self.done + self._patience - self.done % self._patience)
        return min(self.total, max(stop, self.done + 1))

    def advance(self, stop: int, best: BestResults) -> bool:
        if (best.ids[:, : self.k] != self.best.ids[:, : self.k]).any():
            self._changed_at, self._changed = stop, True
        self.best, self.done = best, stop
        if stop == self.total:
            return True
        if self._patience is None or stop % self._patience:
            return False
        ended = not self._changed and bool((self.best.ids[:, self.k - 1] != -1).all())
        self._changed = False
        return ended

    def finish(self, index: ClusterIndex) -> None:
        distances, ids = self._results(self.best, index.similarity)
        if self.done == self.total and len(rows := self.best.tied(self.k)):
            coarse, clusters = self._nearest
            distances[rows], ids[rows] = index.scan(
                self.queries[rows], self.k, clusters[rows], coarse[rows], selector=self.selector
            )
        self.store_past(index)
        stage = _stage(index, self.done, self.done, ids, distances, self.settled)
        self.handle.publish(stage, final=True)

    def publish(self, index: ClusterIndex) -> None:
        best, past_best = self.best, self._past_best
        if past_best is not None:
            left = ~np.isin(past_best.locations[0] >> 32, self.clusters[0, : self.done])
            new = BestResults(past_best.keys[0, left], past_best.ids[0, left], past_best.locations[0, left])
            best = best.merge(np.zeros(len(new.ids), np.intp), new, similarity=index.similarity) if left.any() else best
        distances, ids = self._results(best, index.similarity)
        self.handle.publish(_stage(index, self.done, self.total, ids, distances, self.settled), final=False)

    def store_past(self, index: ClusterIndex) -> None:
        if self.history is None or not self.done:
            return
        found = np.flatnonzero(self.best.ids[0] != -1)[: self.history.kept]
        keys, ids, locations = self.best.keys[0, found], self.best.ids[0, found], self.best.locations[0, found]
        if len(ids):
            self.history.add(
                PastSearch(
                    query=self.queries[0],
                    clusters=self.clusters[0, : self.done],
                    keys=keys,
                    ids=ids,
                    locations=locations,
                    vectors=index.vectors(locations),
                    reach=float(keys[min(self.k, len(keys)) - 1]),
                    metric=index.metric,
                )
            )

    def _results(self, best: BestResults, similarity: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        sign = np.float32(-1 if similarity else 1)
        return best.keys[:, : self.k] * sign, best.ids[:, : self.k].copy()


def _stage(
    index: ClusterIndex, number: int, stages: int, ids: NDArray[np.int64], distances: NDArray[np.float32], settled: int
) -> Any:
    return lambda: Stage(number, stages, index.core.ids(ids), distances, settled)


# Largest cluster, as a share of a core's work, that may spoil an even split.
_EVEN = 1 / 8


class Visits(NamedTuple):
    """(row of a query, cluster) pairs, sorted by row; `codes`: vectors of each cluster."""

    rows: NDArray[np.intp]
    clusters: NDArray[np.int64]
    coarse: NDArray[np.float32]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64]) -> Visits:
        rows, clusters, coarse, row = [], [], [], 0
        for search, stop in piece:
            queries, width = len(search.queries), stop - search.done
            rows.append(np.repeat(np.arange(row, row + queries), width))
            clusters.append(search.clusters[:, search.done : stop].ravel())
            coarse.append(search.coarse[:, search.done : stop].ravel())
            row += queries
        numbers = np.concatenate(clusters)
        visits = cls(np.concatenate(rows), numbers, np.concatenate(coarse), sizes[numbers])
        # -1: a quantizer found fewer clusters than nprobe.
        found = numbers >= 0
        return visits if found.all() else visits.part(found)

    def part(self, chosen: slice | NDArray[np.bool_] | NDArray[np.intp]) -> Visits:
        return Visits(self.rows[chosen], self.clusters[chosen], self.coarse[chosen], self.codes[chosen])

    def deal(self, shares: int) -> list[Visits]:
        if shares == 1 or not len(self.rows):
            return [self] if len(self.rows) else []
        total = np.cumsum(self.codes)
        if self.rows[0] == self.rows[-1] and self.codes.max() * shares > _EVEN * total[-1]:
            return self._deal_by_size(shares)
        cuts = np.searchsorted(total, total[-1] * np.arange(1, shares) / shares).tolist()
        return [self.part(slice(start, stop)) for start, stop in pairwise((0, *cuts, len(self.rows))) if start < stop]

    def _deal_by_size(self, shares: int) -> list[Visits]:
        order = np.argsort(-self.codes, kind="stable")
        busy = [(0, core) for core in range(shares)]
        cores = []
        for codes in self.codes[order].tolist():
            least, core = busy[0]
            heapreplace(busy, (least + codes, core))
            cores.append(core)
        turns = np.argsort(cores, kind="stable")
        dealt, cuts = self.part(order[turns]), np.cumsum(np.bincount(cores, minlength=shares)).tolist()
        return [dealt.part(slice(start, stop)) for start, stop in pairwise((0, *cuts)) if start < stop]

    def padded(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.float32]]:
        """Pad clusters with -1, which FAISS skips."""
        rows = self.rows
        if rows[0] == rows[-1]:
            return rows[:1], self.clusters[None], self.coarse[None]
        starts = np.concatenate(([0], np.flatnonzero(rows[1:] != rows[:-1]) + 1))
        lengths = np.concatenate((starts[1:], [len(rows)])) - starts
        row = np.repeat(np.arange(len(starts)), lengths)
        column = np.arange(len(rows)) - np.repeat(starts, lengths)
        shape = (len(starts), int(lengths.max()))
        clusters, coarse = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        clusters[row, column], coarse[row, column] = self.clusters, self.coarse
        return rows[starts], clusters, coarse
