"""Clusters until a second search is final, and what the first search says about them (HedraRAG Figures 7, 8 and 9)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, History

__all__ = ["as_faiss", "build_index", "early_ends", "final_at", "observations", "partial_texts", "skew", "trace"]

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

# No time for a piece: each is one cluster.
_ONE_CLUSTER_S = 1e-30
_KEPT = 20
_AT_ONCE = 64


def build_index(vectors: Vectors, nprobe: float) -> Any:
    """By inner product, in 4 sqrt(n) clusters, of which a search scans the share `nprobe`."""
    import faiss

    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], clusters, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    index.nprobe = max(1, round(nprobe * clusters))
    return index


def partial_texts(questions: Sequence[str], passages: Sequence[str], share: float) -> list[str]:
    """Each question with the first words of its passage."""
    return [
        f"{question} {' '.join(words[: max(1, round(share * len(words)))])}"
        for question, words in zip(questions, map(str.split, passages), strict=True)
    ]


def trace(index: Any, pairs: Iterable[tuple[Vectors, Vectors]], k: int, *, history: bool) -> Ids:
    """The k best of each pair's second query after each cluster: (pairs, nprobe, k)."""
    search = ContinuousIVF(index, cores=1, budget=Budget(_ONE_CLUSTER_S), thread=False)
    found = []
    for first, second in pairs:
        past = History(kept=_KEPT) if history else None
        if past is not None:
            search.submit(first, k, history=past).result()
        stages = search.submit(second, k, history=past).stages()
        found.append([stage.ids[0] for stage in stages if stage.number])
    return np.array(found)


def as_faiss(index: Any, pairs: Sequence[tuple[Vectors, Vectors]], k: int) -> int:
    """Searches whose ids and distances are FAISS's: both of each pair, with a history, those of 64 pairs at a time."""
    search, equal = ContinuousIVF(index, cores=1, budget=Budget(_ONE_CLUSTER_S), thread=False), 0
    for start in range(0, len(pairs), _AT_ONCE):
        group = pairs[start : start + _AT_ONCE]
        histories = [History(kept=_KEPT) for _ in group]
        for queries in zip(*group, strict=True):
            handles = [search.submit(query, k, history=past) for query, past in zip(queries, histories, strict=True)]
            for query, handle in zip(queries, handles, strict=True):
                distances, ids = index.search(query[None], k)
                found = handle.result()
                equal += bool((found.ids == ids).all() and (found.distances == distances).all())
    return equal


def final_at(found: Ids) -> list[int]:
    """The cluster after which the best, in their order, no longer change, from 1."""
    right = (found == found[:, -1:]).all(axis=2)
    last_wrong = right.shape[1] - 1 - np.argmin(right[:, ::-1], axis=1)
    final: list[int] = np.where(right.all(axis=1), 1, last_wrong + 2).tolist()
    return final


def early_ends(found: Ids, patience: int) -> tuple[float, float]:
    """The share of clusters that this patience saves, and the recall of the final results."""
    nprobe, k = found.shape[1:]
    before = np.concatenate((np.full_like(found[:, :1], -1), found[:, :-1]), axis=1)
    changed = (found != before).any(axis=2)
    saved, hits = 0, 0
    for row, changes in zip(found, changed, strict=True):
        ends = (
            end
            for end in range(patience, nprobe, patience)
            if not changes[end - patience : end].any() and (row[end - 1] != -1).all()
        )
        end = next(ends, nprobe)
        saved += nprobe - end
        hits += np.isin(row[end - 1], row[-1]).sum()
    return float(saved / (nprobe * len(found))), float(hits / (k * len(found)))


def observations(index: Any, first: Vectors, second: Vectors, k: int) -> dict[str, float]:
    """The share of second searches whose results are all among the 20 best of the first; in the clusters of these; in
    clusters that both scan (Figure 9a)."""
    import faiss

    _, wide = index.search(first, _KEPT)
    _, near = index.search(second, k)
    home = np.empty(index.ntotal, np.int64)
    for cluster in range(index.nlist):
        size = index.get_list_size(cluster)
        if size:
            home[faiss.rev_swig_ptr(index.invlists.get_ids(cluster), size)] = cluster
    _, scanned = index.quantizer.search(first, index.nprobe)
    _, again = index.quantizer.search(second, index.nprobe)
    shares = np.zeros(3)
    for row, ids in enumerate(near):
        ids = ids[ids >= 0]
        both = np.intersect1d(scanned[row], again[row])
        shares += (
            np.isin(ids, wide[row]).all(),
            np.isin(home[ids], home[wide[row][wide[row] >= 0]]).all(),
            np.isin(home[ids], both).all(),
        )
    names = ("in the first's 20 best", "in their clusters", "in clusters of both")
    return dict(zip(names, (shares / len(near)).tolist(), strict=True))


def skew(index: Any, queries: Vectors, shares: Sequence[float]) -> dict[str, float]:
    """The share of all codes scanned that is in this share of the clusters, those that cost most (Figure 8)."""
    _, clusters = index.quantizer.search(queries, index.nprobe)
    sizes = np.array([index.get_list_size(cluster) for cluster in range(index.nlist)])
    work = np.sort(np.bincount(clusters.ravel(), minlength=index.nlist) * sizes)[::-1]
    total = np.cumsum(work) / work.sum()
    return {f"{share:g}": float(total[max(1, round(share * index.nlist)) - 1]) for share in shares}
