"""Best results of queries, merged from parts in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import SearchResult
from ragorder.pipelining.staged._ivf import OFFSET, ClusterIndex

_WORST = np.finfo(np.float32).max  # FAISS's distance where nothing was found


@dataclass(frozen=True, slots=True)
class ScannedPart:
    """One call's results for `rows`; `keys`: distances, or negative similarities."""

    rows: NDArray[np.intp]
    keys: NDArray[np.float32]
    ids: NDArray[np.int64]
    locations: bool


@dataclass(frozen=True, slots=True)
class BestResults:
    """Each query's results so far, best first, one more than asked for, to see ties. Never changed."""

    keys: NDArray[np.float32]
    ids: NDArray[np.int64]
    locations: NDArray[np.int64]

    @classmethod
    def none(cls, queries: int, kept: int) -> BestResults:
        shape = (queries, kept)
        return cls(np.full(shape, _WORST, np.float32), np.full(shape, -1, np.int64), np.full(shape, -1, np.int64))

    @classmethod
    def stack(cls, parts: Sequence[BestResults]) -> BestResults:
        if len(parts) == 1:
            return parts[0]
        stacked = cls.none(sum(len(part.keys) for part in parts), max(part.keys.shape[1] for part in parts))
        row = 0
        for part in parts:
            queries, kept = part.keys.shape
            rows = slice(row, row + queries)
            stacked.keys[rows, :kept] = part.keys
            stacked.ids[rows, :kept] = part.ids
            stacked.locations[rows, :kept] = part.locations
            row += queries
        return stacked

    def part(self, start: int, stop: int, kept: int) -> BestResults:
        return BestResults(self.keys[start:stop, :kept], self.ids[start:stop, :kept], self.locations[start:stop, :kept])

    def better(self, part: ScannedPart) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = part.keys < self.keys[part.rows, -1:]
        return found

    def tied(self, k: int) -> NDArray[np.intp]:
        return np.flatnonzero((self.keys[:, k - 1] == self.keys[:, k]) & (self.ids[:, k] != -1))

    def merge(self, rows: NDArray[np.intp], new: BestResults, *, similarity: bool) -> BestResults:
        kept = self.keys.shape[1]
        touched = np.unique(rows)
        row = np.searchsorted(touched, rows)
        owner = np.concatenate((np.repeat(np.arange(len(touched)), kept), row))
        keys = np.concatenate((self.keys[touched].ravel(), new.keys.ravel()))
        ids = np.concatenate((self.ids[touched].ravel(), new.ids.ravel()))
        locations = np.concatenate((self.locations[touched].ravel(), new.locations.ravel()))
        order = np.lexsort((-ids if similarity else ids, keys, owner))
        first = np.searchsorted(owner[order], np.arange(len(touched)))
        chosen = order[first[:, None] + np.arange(kept)]
        merged = BestResults(self.keys.copy(), self.ids.copy(), self.locations.copy())
        merged.keys[touched], merged.ids[touched], merged.locations[touched] = (
            keys[chosen],
            ids[chosen],
            locations[chosen],
        )
        return merged


class TieCandidates(NamedTuple):
    """A query's results at least as good as its k-th. `turns`: their order in FAISS's scan."""

    keys: NDArray[np.float32]
    ids: NDArray[np.int64]
    turns: NDArray[np.int64]


def find_candidates(
    index: ClusterIndex,
    queries: NDArray[np.float32],
    clusters: NDArray[np.int64],
    coarse: NDArray[np.float32],
    edges: NDArray[np.float32],
    kept: int,
) -> list[TieCandidates]:
    """Return each query's results up to its k-th key in `edges`."""
    found: list[TieCandidates] = [_NONE] * len(queries)
    left = np.arange(len(queries))
    while len(left):
        distances, locations = index.scan(queries[left], kept, clusters[left], coarse[left], locations=True)
        keys = -distances if index.similarity else distances
        within = (keys <= edges[left, None]) & (locations >= 0)
        complete = ~within[:, -1]
        for row in np.flatnonzero(complete).tolist():
            chosen = locations[row, within[row]]
            columns = np.argsort(clusters[left[row]], kind="stable")
            column = columns[np.searchsorted(clusters[left[row]], chosen >> 32, sorter=columns)]
            turns = (column.astype(np.int64) << 32) | (chosen & OFFSET)
            found[left[row]] = TieCandidates(keys[row, within[row]], index.ids_at(chosen), turns)
        left, kept = left[~complete], 4 * kept
    return found


def decide(parts: Sequence[TieCandidates], k: int, *, similarity: bool) -> SearchResult:
    """Return the k results that FAISS's heap keeps: of equal worst ones it replaces the largest id."""
    keys, ids, turns = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    sign = 1 if similarity else -1
    heap: list[tuple[float, int]] = []
    for candidate in np.argsort(turns, kind="stable").tolist():
        key, id = float(keys[candidate]), int(ids[candidate])
        if len(heap) < k:
            heappush(heap, (-key, sign * id))
        elif key < -heap[0][0]:
            heapreplace(heap, (-key, sign * id))
    heap.sort(reverse=True)
    return (
        np.array([-negative for negative, _ in heap], np.float32),
        np.array([sign * id for _, id in heap], np.int64),
    )


_NONE = TieCandidates(np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.int64))
