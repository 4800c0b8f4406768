"""Time added by stages, and the stage at which results are final."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining import StagedHNSW, StagedIVF, StagedSearch

__all__ = ["clustered", "final_shares", "searches", "time_stages"]

Vectors = NDArray[np.float32]


class _SearchPair(NamedTuple):
    name: str
    index: Any
    staged: StagedSearch


def time_stages(
    plain: Callable[[Vectors, int], object], staged: StagedSearch, queries: Vectors, k: int
) -> tuple[int, dict[str, list[float]]]:
    """The number of stages, and columns of CPU time in ms: of each query without stages, and added by them. FAISS has
    one thread."""
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        stages = sum(1 for _ in staged.search(queries[:1], k))
        rows: dict[str, list[float]] = {"plain_ms": [], "added_ms": []}
        for number in range(len(queries)):
            query = queries[number : number + 1]
            # The first one alternates: the second finds the vectors in the processor's caches.
            times = [0.0, 0.0]
            for run in (0, 1, 0, 1) if number % 2 else (1, 0, 1, 0):
                start = time.thread_time_ns()
                if run:
                    list(staged.search(query, k))
                else:
                    plain(query, k)
                times[run] += (time.thread_time_ns() - start) / 2e6
            rows["plain_ms"].append(times[0])
            rows["added_ms"].append(times[1] - times[0])
    finally:
        faiss.omp_set_num_threads(threads)
    return stages, rows


def final_shares(staged: StagedSearch, queries: Vectors, depths: Sequence[int]) -> dict[int, list[float]]:
    """For each k the share of queries, stage by stage, whose ordered top k no longer changes."""
    found = [stage.ids for stage in staged.search(queries, max(depths))]
    final = {}
    for k in depths:
        same = np.ones(len(queries), bool)
        shares = []
        for ids in reversed(found):
            same &= (ids[:, :k] == found[-1][:, :k]).all(axis=1)
            shares.append(float(same.mean()))
        final[k] = shares[::-1]
    return final


def clustered(count: int, dimensions: int, *, clusters: int, seed: int) -> Vectors:
    """Vectors of length 1 around centres that are the same for all seeds."""
    centres = np.random.default_rng(0).standard_normal((clusters, dimensions), np.float32)
    rng = np.random.default_rng(seed + 1)
    noise = rng.standard_normal((count, dimensions), np.float32)
    vectors: Vectors = centres[rng.integers(clusters, size=count)] + noise
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def searches(vectors: Vectors, stages: int, policies: Collection[str]) -> Iterator[tuple[str, _SearchPair]]:
    """By policy ("IVF 0.25 equal", "HNSW 64"); to be used one after another, as they share an index."""
    import faiss

    ivf: Any = None
    hnsw: Any = None
    dimensions = vectors.shape[1]
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    for policy in policies:
        kind, size, *growth = policy.split()
        if kind == "IVF":
            if ivf is None:
                ivf = faiss.index_factory(dimensions, f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
                ivf.train(vectors[:: max(1, len(vectors) // (clusters * 40))])
                ivf.add(vectors)
            ivf.nprobe = max(1, round(clusters * float(size)))
            staged = StagedIVF(ivf, stages, growth=growth[0])  # type: ignore[arg-type]
            yield policy, _SearchPair(f"IVFFlat, {ivf.nprobe} of {clusters} clusters, {growth[0]}", ivf, staged)
        else:
            if hnsw is None:
                hnsw = faiss.IndexHNSWFlat(dimensions, 32, faiss.METRIC_INNER_PRODUCT)
                hnsw.add(vectors)
            hnsw.hnsw.efSearch = int(size)
            search = StagedHNSW(hnsw, stages=min(stages, 3))
            yield policy, _SearchPair(f"HNSWFlat, efSearch {size}", hnsw, search)
