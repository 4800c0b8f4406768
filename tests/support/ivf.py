"""FAISS indexes of clustered and of tied vectors, and what a search in stages must find: the same, bit for bit."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragorder.benchmarks.common.vectors import clustered as around_centres
from ragorder.pipelining import ContinuousIVF, Stage
from ragorder.pipelining.search import Budget
from support.rings import examples, grid

D = 16
L2, IP = faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT
SMALL_PIECES = 1e-12
"""An overhead of a piece, in seconds, at which every piece is one cluster."""
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


def undriven(index: Any, nprobe: int | None = None, cores: int = 1, **options: Any) -> ContinuousIVF:
    """A search whose every piece is one cluster, scanned when it is told to or waited for."""
    settings: dict[str, Any] = {"budget": Budget(SMALL_PIECES), "thread": False} | options
    return ContinuousIVF(index, nprobe=nprobe, cores=cores, **settings)


def advance(search: ContinuousIVF, pieces: int) -> None:
    for _ in range(pieces):
        search.advance()


def advance_all(search: ContinuousIVF) -> int:
    """How many pieces were left."""
    return sum(1 for _ in iter(search.advance, False))


def params_of(nprobe: int, **selector: Any) -> Any:
    return faiss.SearchParametersIVF(nprobe=nprobe, **selector)


class AsFaiss(ABC):
    """A search whose last stage has the ids and distances of the index, bit for bit."""

    @abstractmethod
    def found(self, index: Any, queries: Any, k: int, folder: Path, chance: Random) -> Stage:
        """The last stage of a search; its settings may be drawn."""

    def check(self, index: Any, queries: Any, k: int, folder: Path, seed: int = 0) -> None:
        assert_same(self.found(index, queries, k, folder, Random(seed)), index.search(queries, k))

    @pytest.mark.parametrize(
        ("description", "metric", "data"),
        grid([*itertools.product(MORE_FLAVOURS, METRICS.values(), DATA), ("IMI2x3,Flat", L2, "ties")], 24),
    )
    def test_in_every_kind_of_ivf(self, description: str, metric: int, data: str, tmp_path: Path) -> None:
        index = build(description, metric, DATA[data](600, 0), nprobe=11)
        for k in (1, 7, 40):
            self.check(index, DATA[data](30, 1), k, tmp_path, k)

    # Each search inherits it.
    @settings(max_examples=examples(300), suppress_health_check=[HealthCheck.differing_executors])
    @given(
        metric=st.sampled_from([L2, IP]),
        levels=st.integers(2, 6),
        vectors=st.integers(0, 120),
        nlist=st.integers(1, 12),
        k=st.integers(1, 30),
        seed=st.integers(0, 2**16),
    )
    def test_where_distances_tie_all_over(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        metric: int,
        levels: int,
        vectors: int,
        nlist: int,
        k: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        index = tied_index(rng, metric, levels, vectors, nlist)
        index.nprobe = int(rng.integers(1, nlist + 4))
        queries = rng.integers(0, levels, (20, 3)).astype(np.float32)
        self.check(index, queries, k, tmp_path_factory.getbasetemp(), seed)

    def test_in_a_batch_that_faiss_would_split_over_cores(self, tmp_path: Path) -> None:
        index = build("IVF24,PQ4x4", nprobe=12)
        try:
            faiss.omp_set_num_threads(3)
            self.check(index, clustered(70, 1), 5, tmp_path)
        finally:
            faiss.omp_set_num_threads(1)

    def test_of_ids_of_its_own(self, tmp_path: Path) -> None:
        ids = np.random.default_rng(0).permutation(20_000)[:2000]
        for wrapper in ("IDMap2", "IDMap2,PCA8"):
            self.check(build(f"{wrapper},IVF24,Flat", ids=ids, nprobe=9), clustered(60, 1), 5, tmp_path)

    def test_of_no_queries_of_nan_and_of_an_index_without_vectors(self, tmp_path: Path) -> None:
        index = build(nprobe=5)
        self.check(index, np.empty((0, D), np.float32), 5, tmp_path)
        self.check(index, np.full((1, D), np.nan, np.float32), 5, tmp_path)
        index.reset()
        self.check(index, clustered(3, 1), 5, tmp_path)
