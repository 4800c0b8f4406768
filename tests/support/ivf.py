"""FAISS indexes of clustered and of tied vectors, and what a search in stages must find: the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ragorder.benchmarks.common.vectors import clustered as around_centres
from ragorder.pipelining import Stage

D = 16
L2, IP = faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT
METRICS = {"L2": L2, "inner product": IP}
FLAVOURS = [
    *("IVF24,Flat", "IVF24,PQ4x4", "IVF24,SQ8", "IVF24,SQfp16", "IVF24,RaBitQ", "IVF24_HNSW8,Flat", "PCA8,IVF24,Flat"),
]
MORE_FLAVOURS = [*FLAVOURS, "IVF24,EDEN", "IVF24,RQ2x4", "L2norm,IVF24,Flat"]
EVERY_FLAVOUR = [*MORE_FLAVOURS, "IVF24,FlatPanorama4", "IVF24,SQ4"]


def clustered(count: int, seed: int, dimension: int = D, clusters: int = 60) -> Any:
    """Vectors of length 1 around centres that are the same for all seeds."""
    return around_centres(count, dimension, clusters=clusters, seed=seed)


def tied(count: int, seed: int) -> Any:
    """Vectors of few small integers, many of them twice: most distances occur again and again."""
    vectors = np.random.default_rng(seed).integers(0, 3, (count, D)).astype(np.float32)
    vectors[count // 2 :] = vectors[: count - count // 2]
    return vectors


DATA = {"distinct distances": clustered, "ties": tied}


def build(
    description: str = "IVF24,Flat",
    metric: int = L2,
    vectors: Any = None,
    *,
    ids: Any = None,
    nprobe: int | None = None,
) -> Any:
    """An index of these vectors, or else of 2000 clustered ones; `ids`: the caller's own."""
    vectors = clustered(2000, 0) if vectors is None else vectors
    index = faiss.index_factory(len(vectors[0]), description, metric)
    index.train(vectors)
    if ids is None:
        index.add(vectors)
    else:
        index.add_with_ids(vectors, ids)
    if nprobe:
        set_nprobe(index, nprobe)
    return index


def tied_index(rng: Any, metric: int, levels: int, vectors: int, nlist: int) -> Any:
    """An index of three dimensions in which distances tie all over."""
    quantizer = faiss.IndexFlat(3, metric)
    quantizer.add(rng.integers(0, levels, (nlist, 3)).astype(np.float32))
    index = faiss.IndexIVFFlat(quantizer, 3, nlist, metric)
    index.add_with_ids(rng.integers(0, levels, (vectors, 3)).astype(np.float32), rng.permutation(vectors))
    return index


def set_nprobe(index: Any, nprobe: int) -> None:
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", nprobe)


def write(index: Any, folder: Path) -> Path:
    path = folder / "index.faiss"
    faiss.write_index(index, str(path))
    return path


def last(stages: Iterable[Stage]) -> Stage:
    *_, found = stages
    return found


def assert_same(found: Stage, searched: tuple[Any, Any], row: int | None = None) -> None:
    """`row`: of the batch that was searched."""
    distances, ids = searched if row is None else (array[row : row + 1] for array in searched)
    np.testing.assert_array_equal(found.distances, distances)
    np.testing.assert_array_equal(found.ids, ids)
