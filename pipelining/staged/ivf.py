"""Staged IVF search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import index as as_int
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import SearchResult, read_k, read_queries
from ragorder.pipelining.staged._ivf import ClusterIndex, read_nprobe
from ragorder.pipelining.staged.base import Stage


class StagedIVF:
    """Searches an IVF index in stages, nearest clusters first.

        for stage in StagedIVF(index, stages=4).search(queries, k=5):
            print(stage.number, stage.ids)

    - `index`: a FAISS IVF index, bare or in IndexIDMap, IndexIDMap2 or IndexPreTransform
    - `growth`: "equal" stages, "geometric" ones, which double the clusters scanned so far, or each stage's clusters
    - `nprobe`: clusters of all stages (default: the index's own)

    The last stage equals `index.search`, ties included. The index must not change during a search. Raises TypeError for
    an index that cannot be staged exactly.
    """

    def __init__(
        self,
        index: Any,
        stages: int = 4,
        *,
        growth: Literal["equal", "geometric"] | Sequence[int] = "equal",
        nprobe: int | None = None,
    ) -> None:
        self._index = ClusterIndex(index, "StagedIVF")
        self._counts: tuple[int, ...] | None = None
        if not isinstance(growth, str):
            self._counts = tuple(as_int(count) for count in growth)
            if not self._counts or min(self._counts) < 1:
                raise ValueError(f"each stage scans at least one cluster, got growth={self._counts}")
            if nprobe is not None and nprobe != sum(self._counts):
                raise ValueError(f"nprobe={nprobe}, but the stages of growth={self._counts} scan {sum(self._counts)}")
            nprobe = sum(self._counts)
        elif growth not in ("equal", "geometric"):
            raise ValueError(f"growth must be 'equal', 'geometric' or counts of clusters, got {growth!r}")
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self._stages, self._growth, self._nprobe = stages, growth, read_nprobe(nprobe)

    def search(self, queries: Any, k: int, *, selector: Any = None) -> Iterator[Stage]:
        """See `StagedSearch.search`. `selector`: a faiss.IDSelector."""
        k, rows = read_k(k), read_queries(queries, self._index.core.outer.d)
        self._index.check_settings()
        nprobe = self._index.nprobe(self._nprobe)
        return self._run(rows, k, _cuts(nprobe, self._stages, self._growth, self._counts), selector)

    def _run(self, queries: NDArray[np.float32], k: int, cuts: list[int], selector: Any) -> Iterator[Stage]:
        index, core = self._index, self._index.core
        queries, selector = core.transform_queries(queries), core.selector(selector)
        coarse, clusters = index.nearest_clusters(queries, cuts[-1], index.slices(len(queries)))
        merge: TopKMerge | None = None
        for number, (start, stop) in enumerate(pairwise(cuts), 1):
            found = index.scan(queries, k, clusters[:, start:stop], coarse[:, start:stop], selector=selector)
            if merge is None:
                merge = TopKMerge(found, similarity=index.similarity)
            else:
                merge.add(found)
            if stop == cuts[-1] and len(rows := merge.uncertain):
                merge.replace(rows, index.scan(queries[rows], k, clusters[rows], coarse[rows], selector=selector))
            yield Stage(number, len(cuts) - 1, core.ids(merge.ids), merge.distances)


def _cuts(nprobe: int, stages: int, growth: object, counts: Sequence[int] | None) -> list[int]:
    if counts is not None:
        return sorted({min(nprobe, int(total)) for total in np.cumsum((0, *counts))})
    stages = min(stages, nprobe)
    if growth == "geometric":
        return [0] + [max(number, nprobe >> (stages - number)) for number in range(1, stages + 1)]
    return [nprobe * number // stages for number in range(stages + 1)]


class TopKMerge:
    """Each query's best k, merged part by part, in FAISS's order of ties."""

    def __init__(self, first: SearchResult, *, similarity: bool) -> None:
        self.distances, self.ids = first
        self._sign = np.float32(-1 if similarity else 1)
        self._id_sign = -1 if similarity else 1
        self._keys = self.distances * self._sign
        self._doubt: NDArray[np.float32] | None = None

    @property
    def uncertain(self) -> NDArray[np.intp]:
        if self._doubt is None:
            return np.empty(0, np.intp)
        return np.flatnonzero(self._doubt == self._keys[:, -1])

    def add(self, part: SearchResult) -> None:
        distances, ids = part
        keys = distances * self._sign
        if not (keys[:, 0] < self._keys[:, -1]).any():
            return
        k = keys.shape[1]
        all_keys = np.concatenate((self._keys, keys), axis=1)
        all_ids = np.concatenate((self.ids, ids), axis=1)
        order = np.argsort(all_keys, axis=1, kind="stable")
        rows = np.arange(len(keys))
        edge = all_keys[rows, order[:, k - 1]]
        beyond = order[:, k]
        cut = (edge == all_keys[rows, beyond]) & (all_ids[rows, beyond] != -1)
        # If earlier parts had k vectors as good, no tie of this part was added, and their order is right.
        if cut.any() and (cut := cut & (edge < self._keys[:, -1]) & (keys == edge[:, None]).any(axis=1)).any():
            doubt = np.full(len(keys), np.nan, np.float32) if self._doubt is None else self._doubt
            self._doubt = np.where(cut, edge, doubt)
        order, rows = order[:, :k], rows[:, None]
        new_keys, new_ids = all_keys[rows, order], all_ids[rows, order]
        if (new_keys[:, 1:] == new_keys[:, :-1]).any():
            again = np.lexsort((new_ids * self._id_sign, new_keys), axis=1)
            new_keys, new_ids = new_keys[rows, again], new_ids[rows, again]
        self._keys, self.ids = new_keys, new_ids
        self.distances = new_keys * self._sign

    def replace(self, rows: NDArray[np.intp], found: SearchResult) -> None:
        self.distances, self.ids = self.distances.copy(), self.ids.copy()
        self.distances[rows], self.ids[rows] = found
        self._keys = self.distances * self._sign
        self._doubt = None
