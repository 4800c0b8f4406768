"""Clusters of a FAISS IVF index, scanned by number."""

from __future__ import annotations

from itertools import pairwise
from operator import index as as_int
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import SearchResult, load_faiss, unwrap

Metric = Literal["L2", "inner product"]

# Indexes that scan clusters into one heap, with distances that depend only on query, cluster and code.
_EXACT = {
    "IndexIVFFlat",
    "IndexIVFFlatPanorama",
    "IndexIVFPQ",
    "IndexIVFScalarQuantizer",
    "IndexIVFSpectralHash",
    "IndexIVFRaBitQ",
    "IndexIVFEDEN",
    "IndexIVFResidualQuantizer",
    "IndexIVFLocalSearchQuantizer",
    "IndexIVFProductResidualQuantizer",
    "IndexIVFProductLocalSearchQuantizer",
}
OFFSET = (1 << 32) - 1


class ClusterIndex:
    """An IVF index whose scanned parts add up to its search. Raises TypeError for others."""

    def __init__(self, index: Any, searcher: str) -> None:
        self.core = unwrap(index)
        self.ivf = self.core.index
        _check_type(self.ivf, searcher)
        self.check_settings()
        self._faiss = load_faiss()
        metrics: dict[int, Metric] = {self._faiss.METRIC_L2: "L2", self._faiss.METRIC_INNER_PRODUCT: "inner product"}
        self.metric = metrics.get(self.ivf.metric_type)
        self.similarity: bool = self._faiss.is_similarity_metric(self.ivf.metric_type)

    def check_settings(self) -> None:
        name = type(self.ivf).__name__
        if self.ivf.max_codes:
            raise ValueError(f"{name} has max_codes={self.ivf.max_codes}, a limit across stages: set it to 0")
        if self.ivf.parallel_mode not in (0, 3):
            raise ValueError(
                f"{name} has parallel_mode={self.ivf.parallel_mode}, where ties are random: set it to 0 or 3"
            )

    def nprobe(self, nprobe: int | None) -> int:
        if nprobe is None and self.ivf.nprobe < 1:
            raise ValueError("the index has nprobe 0: set it to at least 1")
        return min(int(self.ivf.nlist), int(self.ivf.nprobe) if nprobe is None else nprobe)

    def slices(self, queries: int) -> int:
        """Return FAISS's slices of queries: distances computed together differ in their last bits."""
        if queries > 1 and self.ivf.parallel_mode == 0:
            return min(int(self._faiss.omp_get_max_threads()), queries)
        return 1

    def nearest_clusters(self, queries: NDArray[np.float32], nprobe: int, slices: int) -> SearchResult:
        if slices == 1:
            distances, clusters = self.ivf.quantizer.search(queries, nprobe)
            return distances, clusters
        bounds = pairwise(len(queries) * number // slices for number in range(slices + 1))
        parts = [self.ivf.quantizer.search(queries[start:stop], nprobe) for start, stop in bounds]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def scan(
        self,
        queries: NDArray[np.float32],
        k: int,
        clusters: NDArray[np.int64],
        coarse: NDArray[np.float32],
        *,
        selector: Any = None,
        locations: bool = False,
    ) -> SearchResult:
        """Return each query's k best in its row of `clusters` (-1: none), with ids or cluster << 32 | offset."""
        faiss = self._faiss
        queries, coarse = np.ascontiguousarray(queries), np.ascontiguousarray(coarse)
        clusters = np.ascontiguousarray(clusters)
        distances = np.empty((len(queries), k), np.float32)
        ids = np.empty((len(queries), k), np.int64)
        chosen = {} if selector is None else {"sel": selector}
        # FAISS's Python wrapper has no parameters; the index's nprobe would have to be changed.
        self.ivf.search_preassigned_c(
            len(queries),
            faiss.swig_ptr(queries),
            k,
            faiss.swig_ptr(clusters),
            faiss.swig_ptr(coarse),
            faiss.swig_ptr(distances),
            faiss.swig_ptr(ids),
            locations,
            faiss.SearchParametersIVF(nprobe=clusters.shape[1], **chosen),
        )
        return distances, ids

    def ids_at(self, locations: NDArray[np.int64]) -> NDArray[np.int64]:
        lists = self.ivf.invlists
        ids = (lists.get_single_id(location >> 32, location & OFFSET) for location in locations.tolist())
        return np.fromiter(ids, np.int64, len(locations))

    def vectors(self, locations: NDArray[np.int64]) -> NDArray[np.float32] | None:
        vectors = np.empty((len(locations), self.ivf.d), np.float32)
        try:
            for vector, location in zip(vectors, locations.tolist(), strict=True):
                self.ivf.reconstruct_from_offset(location >> 32, location & OFFSET, self._faiss.swig_ptr(vector))
        except RuntimeError:
            return None
        return vectors


def read_nprobe(nprobe: int | None) -> int | None:
    if nprobe is not None and as_int(nprobe) < 1:
        raise ValueError(f"nprobe must be at least 1, got {nprobe}")
    return nprobe


def _check_type(ivf: Any, searcher: str) -> None:
    name = type(ivf).__name__
    if name in _EXACT and not (name == "IndexIVFRaBitQ" and ivf.rabitq.nb_bits > 1):
        return
    if name == "IndexIVFRaBitQ":
        advice = "with more than one bit it skips codes by the best results so far; use RaBitQ with one bit"
    elif not isinstance(ivf, load_faiss().IndexIVF):
        advice = "StagedHNSW is for HNSW; of an IndexRefine, stage the base_index and refine what it finds"
    elif "FastScan" in name:
        advice = "it keeps other ones of its many ties; use the index without fast scan"
    else:
        advice = "its stages do not add up to its search; use IndexIVFFlat, IndexIVFPQ or IndexIVFScalarQuantizer"
    raise TypeError(f"{searcher} cannot search {name} in stages exactly: {advice}, or search it without stages")
