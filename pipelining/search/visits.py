"""Clusters to scan, each for one query."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.running import RunningSearch

__all__ = ["Visits"]

# Of a share: a cluster that is no larger does not matter to it.
_EVEN = 1 / 8


class Visits(NamedTuple):
    """(row of a query, cluster) pairs, sorted by row; `codes` are those of each cluster."""

    rows: NDArray[np.intp]
    clusters: NDArray[np.int64]
    coarse: NDArray[np.float32]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, piece: Sequence[tuple[RunningSearch, int]], sizes: NDArray[np.int64]) -> Visits:
        """Of searches, each up to a cluster."""
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
        """At most so many parts of about equal codes, none empty."""
        if shares == 1 or not len(self.rows):
            return [self] if len(self.rows) else []
        total = np.cumsum(self.codes)
        if self.rows[0] == self.rows[-1] and self.codes.max() * shares > _EVEN * total[-1]:
            return self._deal_by_size(shares)
        cuts = np.searchsorted(total, total[-1] * np.arange(1, shares) / shares).tolist()
        return [self.part(slice(start, stop)) for start, stop in pairwise((0, *cuts, len(self.rows))) if start < stop]

    def _deal_by_size(self, shares: int) -> list[Visits]:
        """Largest first, each to the core that has least: of few clusters one more would be a long wait."""
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
        """The rows, and the clusters of each in a row of its own, filled up by -1, which FAISS passes over."""
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
