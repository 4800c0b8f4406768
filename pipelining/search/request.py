"""Checked arguments and history of a search."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.merge import BestResults
from ragorder.pipelining.staged._faiss import load_faiss, read_k, read_queries
from ragorder.pipelining.staged._ivf import ClusterIndex, Metric, read_nprobe


@dataclass(frozen=True, slots=True, eq=False)
class PastSearch:
    """An ended search: the `clusters` scanned, and its k-th key, the `reach`."""

    query: NDArray[np.float32]
    clusters: NDArray[np.int64]
    keys: NDArray[np.float32]
    ids: NDArray[np.int64]
    locations: NDArray[np.int64]
    vectors: NDArray[np.float32] | None
    reach: float
    metric: Metric | None

    def order(self, clusters: NDArray[np.int64]) -> NDArray[np.intp]:
        found = np.isin(clusters, self.locations >> 32)
        scanned = np.isin(clusters, self.clusters)
        return np.argsort(np.where(found, 0, np.where(scanned, 1, 2)), kind="stable")

    def key(self, query: NDArray[np.float32]) -> float | None:
        if self.metric is None:
            return None
        return float(_keys(query, self.query[None], self.metric)[0])

    def results_in(self, query: NDArray[np.float32], clusters: NDArray[np.int64]) -> BestResults | None:
        if self.vectors is None or self.metric is None:
            return None
        there = np.flatnonzero(np.isin(self.locations >> 32, clusters))
        keys = _keys(query, self.vectors[there], self.metric)
        order = np.argsort(keys, kind="stable")
        chosen = there[order]
        return BestResults(keys[None, order], self.ids[None, chosen], self.locations[None, chosen])


class History:
    """The last searches of one request, which order the clusters of its next ones: the same results, found earlier.

    A past search is similar if its query is as near as its k-th result (Figure 7a). `kept`: results stored of each
    (paper: 20). Requests must not share it.
    """

    def __init__(self, kept: int = 20, searches: int = 4) -> None:
        if kept < 1 or searches < 1:
            raise ValueError(f"a history keeps at least one result of one search, got kept={kept}, searches={searches}")
        self.kept = kept
        self._past: deque[PastSearch] = deque(maxlen=searches)

    def __len__(self) -> int:
        return len(self._past)

    def branch(self) -> History:
        branch = History(self.kept, self._past.maxlen or 1)
        branch._past.extend(self._past.copy())
        return branch

    def add(self, past: PastSearch) -> None:
        self._past.append(past)

    def similar(self, query: NDArray[np.float32]) -> PastSearch | None:
        best, best_key = None, np.inf
        for past in tuple(self._past):
            key = past.key(query)
            if key is not None and key <= past.reach and key < best_key:
                best, best_key = past, key
        return best


def _keys(query: NDArray[np.float32], vectors: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    if metric == "L2":
        apart = vectors - query
        squares: NDArray[np.float32] = np.einsum("ij,ij->i", apart, apart)
        return squares
    products: NDArray[np.float32] = -(vectors @ query)
    return products


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """`selector` has the IVF index's ids, and `params` keeps it alive."""

    queries: NDArray[np.float32]
    k: int
    nprobe: int
    slices: int
    history: History | None = None
    selector: Any = None
    params: Any = None

    @classmethod
    def read(
        cls, index: ClusterIndex, queries: Any, k: int, nprobe: int | None, params: Any, history: History | None = None
    ) -> Self:
        outer = index.core.outer
        # The caller may change its array.
        k, rows = read_k(k), read_queries(queries, outer.d).copy()
        if k > outer.ntotal:
            raise ValueError(f"k={k}, but the index has {outer.ntotal} vectors: give a smaller k")
        index.check_settings()
        own_nprobe, selector = _read_parameters(params)
        if selector is not None and history is not None:
            raise ValueError("a search with a selector has no history: ids of the history may be secret")
        nprobe = index.nprobe(nprobe if own_nprobe is None else own_nprobe)
        return cls(rows, k, nprobe, index.slices(len(rows)), history, index.core.selector(selector), params)


def one_row(query: Any) -> NDArray[Any]:
    row = np.asarray(query)
    if row.ndim == 2 and len(row) != 1:
        raise ValueError(f"submit takes one query, got {len(row)}: use search")
    return row[None] if row.ndim == 1 else row


def _read_parameters(params: Any) -> tuple[int | None, Any]:
    if params is None:
        return None, None
    name = type(params).__name__
    if not isinstance(params, load_faiss().SearchParametersIVF):
        raise TypeError(f"params must be faiss.SearchParametersIVF(nprobe=…, sel=…), got {name}")
    if params.max_codes:
        raise ValueError(f"params have max_codes={params.max_codes}, a limit across stages: set it to 0")
    if params.quantizer_params is not None:
        raise ValueError("params have quantizer_params, which stages do not pass on: set the quantizer itself")
    return read_nprobe(params.nprobe), params.sel
