"""Ties at the last place, decided as FAISS's heap decides them, from parts scanned in any order."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import SearchResult
from ragorder.pipelining.staged._ivf import ClusterIndex

__all__ = ["TieCandidates", "decide", "find_candidates"]

_OFFSET = (1 << 32) - 1


class TieCandidates(NamedTuple):
    """Results of one query that are as good as its k-th or better. `turns`: when FAISS's scan comes to each."""

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
    """All candidates of each query in its row of `clusters` (-1: none), whose columns are in the order of FAISS's scan.
    `edges`: the k-th key of each; `kept`: results to begin with."""
    found: list[TieCandidates] = [_NONE] * len(queries)
    left = np.arange(len(queries))
    while len(left):
        distances, places = index.scan(queries[left], kept, clusters[left], coarse[left], places=True)
        keys = -distances if index.similarity else distances
        within = (keys <= edges[left, None]) & (places >= 0)
        complete = ~within[:, -1]
        for row in np.flatnonzero(complete).tolist():
            chosen = places[row, within[row]]
            columns = np.argsort(clusters[left[row]], kind="stable")
            column = columns[np.searchsorted(clusters[left[row]], chosen >> 32, sorter=columns)]
            turns = (column.astype(np.int64) << 32) | (chosen & _OFFSET)
            found[left[row]] = TieCandidates(keys[row, within[row]], index.ids_at(chosen), turns)
        left, kept = left[~complete], 4 * kept
    return found


def decide(parts: Sequence[TieCandidates], k: int, *, similarity: bool) -> SearchResult:
    """The k results that FAISS keeps, best first.

    Its heap takes what is better than its worst, in place of the worst one with the largest id (for similarities the
    smallest). Whatever is worse than the k-th has gone by then, so that these candidates alone decide.
    """
    keys, ids, turns = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    sign = 1 if similarity else -1
    heap: list[tuple[float, int]] = []
    for place in np.argsort(turns, kind="stable").tolist():
        key, id = float(keys[place]), int(ids[place])
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
