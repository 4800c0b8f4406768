"""A batch of searches of vectors on disk: bytes in memory, bytes read, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.doll.disk_index.record import DiskIndexCell
from ragorder.benchmarks.hedra.locality.measuring import build_index
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["POLICIES", "Found", "measure", "refine"]

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

_PAGE = 4096
_ID_BYTES = 8


class Found(NamedTuple):
    """`ids` of shape (queries, k); most bytes of codes and vectors in memory at a time, and bytes read."""

    ids: Ids
    memory_bytes: int
    read_bytes: int


def measure(policy: str, vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> tuple[Found, float]:
    """What the batch found, and the share of the true nearest that is in it."""
    faiss = load_faiss()
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    _, nearest = exact.search(queries, cell.top_k)
    found = POLICIES[policy](vectors, queries, cell, folder)
    hits = sum(len(np.intersect1d(row, true)) for row, true in zip(found.ids, nearest, strict=True))
    return found, hits / nearest.size


def refine(file: NDArray[np.float32], queries: Vectors, candidates: Ids, k: int) -> Found:
    """The k best of each query's candidates by the vectors in a mapped file; each page is read once for all."""
    width = file.shape[1] * file.itemsize
    wanted = np.unique(candidates[candidates >= 0])
    vectors = dict(zip(wanted.tolist(), np.asarray(file[wanted]), strict=True))
    ids = np.full((len(queries), k), -1, np.int64)
    for row, (query, numbers) in enumerate(zip(queries, candidates, strict=True)):
        numbers = numbers[numbers >= 0]
        products = np.array([vectors[number] @ query for number in numbers.tolist()])
        best = numbers[np.argsort(-products, kind="stable")[:k]]
        ids[row, : len(best)] = best
    pages = {page for number in wanted.tolist() for page in _pages(number * width, width)}
    return Found(ids, 0, len(pages) * _PAGE)


def _pages(offset: int, width: int) -> range:
    return range(offset // _PAGE, (offset + width - 1) // _PAGE + 1)


def _partitions(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> Found:
    """All are read, one after another; one is in memory."""
    index = build_index(vectors, cell.nprobe)
    _, ids = index.search(queries, cell.top_k)
    size = vectors.nbytes + _ID_BYTES * len(vectors)
    return Found(ids, -(-size // cell.partitions), size)


def _codes(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path, *, factor: int = 1) -> Found:
    """Product quantisation in memory alone."""
    faiss = load_faiss()
    dimensions = vectors.shape[1]
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    codes = f"IVF{clusters},PQ{dimensions // cell.dimensions_a_byte}x8"
    index: Any = faiss.index_factory(dimensions, codes, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    # Takes a minute, and serves Hamming distances alone.
    index.do_polysemous_training = False
    index.train(vectors)
    index.add(vectors)
    index.nprobe = max(1, round(cell.nprobe * clusters))
    _, ids = index.search(queries, factor * cell.top_k)
    return Found(ids, (index.code_size + _ID_BYTES) * len(vectors), 0)


def _refined(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> Found:
    """More candidates by their codes, the best of them by their vectors on disk."""
    candidates = _codes(vectors, queries, cell, folder, factor=cell.factor)
    path = folder / "vectors.npy"
    np.save(path, vectors)
    found = refine(np.load(path, mmap_mode="r"), queries, candidates.ids, cell.top_k)
    return found._replace(memory_bytes=candidates.memory_bytes)


POLICIES: dict[str, Callable[[Vectors, Vectors, DiskIndexCell, Path], Found]] = {
    "partitions": _partitions,
    "codes": _codes,
    "codes refined": _refined,
}
