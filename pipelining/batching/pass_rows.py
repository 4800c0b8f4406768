"""Queries of a pass over partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.batching.partition_file import PartitionFile
from ragorder.pipelining.search.merge import BestResults, TieCandidates, decide, find_candidates
from ragorder.pipelining.search.running import Visits

# Candidates in the first scan for ties, as a multiple of k + 1.
_FIRST_KEPT = 2


@dataclass(slots=True, eq=False)
class PassRows:
    """Each query's clusters, nearest first, and `due[row, partition]`: partitions to be scanned for it.

    `edges`: NaN, or the key of a tied last result: then the partitions are scanned again for `candidates`.
    """

    k: int
    queries: NDArray[np.float32]
    clusters: NDArray[np.int64]
    coarse: NDArray[np.float32]
    homes: NDArray[np.int64]
    due: NDArray[np.bool_]
    best: BestResults
    edges: NDArray[np.float32]
    candidates: list[list[TieCandidates]] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        k: int,
        queries: NDArray[np.float32],
        coarse: NDArray[np.float32],
        clusters: NDArray[np.int64],
        file: PartitionFile,
    ) -> Self:
        # A partition is not read for an empty cluster.
        homes = np.where(file.sizes[clusters] > 0, file.home[clusters], file.count)
        count = len(queries)
        due = np.zeros((count, file.count + 1), np.bool_)
        np.put_along_axis(due, homes, True, axis=1)
        due[:, -1] = False
        best = BestResults.none(count, k + 1)
        edges = np.full(count, np.nan, np.float32)
        return cls(k, queries, clusters, coarse, homes, due, best, edges, [[] for _ in range(count)])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        if len({(part.k, part.clusters.shape[1]) for part in parts}) > 1:
            raise ValueError("searches can be joined if they have the same k and nprobe")
        columns = ("keys", "ids", "locations")
        best = BestResults(*(np.concatenate([getattr(part.best, name) for part in parts]) for name in columns))
        names = ("queries", "clusters", "coarse", "homes", "due")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        edges = np.concatenate([part.edges for part in parts])
        candidates = [list(found) for part in parts for found in part.candidates]
        return cls(parts[0].k, **arrays, best=best, edges=edges, candidates=candidates)

    def part(self, rows: Sequence[int]) -> Self:
        chosen = np.array(rows, np.intp)
        best = BestResults(self.best.keys[chosen], self.best.ids[chosen], self.best.locations[chosen])
        return type(self)(
            self.k,
            self.queries[chosen],
            self.clusters[chosen],
            self.coarse[chosen],
            self.homes[chosen],
            self.due[chosen].copy(),
            best,
            self.edges[chosen].copy(),
            [list(self.candidates[row]) for row in rows],
        )

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def ended(self) -> NDArray[np.bool_]:
        ended: NDArray[np.bool_] = np.logical_not(self.due.any(axis=1))
        return ended

    @property
    def needed(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.due.any(axis=0))

    def visits(self, partitions: NDArray[np.bool_], sizes: NDArray[np.int64]) -> Visits:
        rows, columns = np.nonzero(self._due_clusters(partitions) & np.isnan(self.edges)[:, None])
        clusters = self.clusters[rows, columns]
        return Visits(rows, clusters, self.coarse[rows, columns], sizes[clusters])

    def scanned(self, partitions: NDArray[np.bool_], best: BestResults, found: dict[int, TieCandidates]) -> None:
        """Must not fail, so that a pass can continue after an error."""
        self.best = best
        for row, candidates in found.items():
            self.candidates[row].append(candidates)
        before = self.ended
        self.due[:, partitions] = False
        ended = self.ended & ~before
        tied = np.zeros(len(self), np.bool_)
        tied[best.tied(self.k)] = True
        for row in np.flatnonzero(ended & tied & np.isnan(self.edges)).tolist():
            self.edges[row] = best.keys[row, self.k - 1]
            self.due[row, self.homes[row]] = True
            self.due[row, -1] = False

    def find_ties(self, partitions: NDArray[np.bool_], file: PartitionFile) -> dict[int, TieCandidates]:
        second = self.due[:, partitions].any(axis=1) & ~np.isnan(self.edges)
        rows = np.flatnonzero(second)
        if not len(rows):
            return {}
        clusters = np.where(self._due_clusters(partitions)[rows], self.clusters[rows], -1)
        found = find_candidates(
            file.index, self.queries[rows], clusters, self.coarse[rows], self.edges[rows], _FIRST_KEPT * (self.k + 1)
        )
        return dict(zip(rows.tolist(), found, strict=True))

    def results(self, *, similarity: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        keys, ids = self.best.keys[:, : self.k].copy(), self.best.ids[:, : self.k].copy()
        for row in np.flatnonzero(self.ended & ~np.isnan(self.edges)).tolist():
            keys[row], ids[row] = decide(self.candidates[row], self.k, similarity=similarity)
        return keys * np.float32(-1 if similarity else 1), ids

    def _due_clusters(self, partitions: NDArray[np.bool_]) -> NDArray[np.bool_]:
        due: NDArray[np.bool_] = np.take_along_axis(self.due, self.homes, axis=1) & partitions[self.homes]
        return due
