"""FAISS file of a corpus, given or built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from math import isqrt
from pathlib import Path
from typing import Any, Protocol

from ragorder.common.files import cache_folder, wait_for_lock
from ragorder.pipelining.batching.partition_file import PartitionFile
from ragorder.pipelining.staged._faiss import load_faiss

# FAISS asks for this number of vectors to train a cluster.
_VECTORS_A_CLUSTER = 39
_CLUSTERS_A_ROOT = 4
_AT_ONCE = 64
_STEPS = 10


class Embedder(Protocol):
    @property
    def model(self) -> str: ...

    def encode(self, texts: Sequence[str], /) -> Any:
        """Return unit vectors, an array of shape (texts, dimensions)."""


def corpus_index(
    texts: Sequence[str], embedder: Embedder, given: Path | None = None, *, say: Callable[[str], object]
) -> Path:
    """Return the `given` index of these texts, or one in the user's cache, built if missing.

    A built index searches all vectors. `say` reports its progress. Raises ValueError or TypeError for an index of other
    texts, of another model's vectors or that cannot be cut into partitions; OSError, ImportError.
    """
    path = _built(texts, embedder, say) if given is None else given
    count, dimensions = _shape(path)
    if count != len(texts):
        raise ValueError(
            f"{path} has {count:,} vectors, and the corpus {len(texts):,} documents: give the index of this corpus, "
            "with one vector for each document, in their order"
        )
    embedded = embedder.encode(texts[:1]).shape[1]
    if embedded != dimensions:
        raise ValueError(
            f"{path} has vectors of {dimensions} dimensions, and {embedder.model} makes {embedded}: give the embedding "
            "model that the index was made with"
        )
    return path


def _shape(path: Path) -> tuple[int, int]:
    file = PartitionFile(path, 1, searcher="PartitionedSearch")
    try:
        return int(file.sizes.sum()), int(file.index.core.outer.d)
    finally:
        file.close()


def _built(texts: Sequence[str], embedder: Embedder, say: Callable[[str], object]) -> Path:
    folder = cache_folder() / "indexes"
    path = folder / f"{_digest(texts, embedder.model)}.faiss"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        wait_for_lock(lock)
        # Another process may have been faster.
        if not path.exists():
            say(f"Embedding {len(texts):,} documents with {embedder.model} into {path}, once.")
            unfinished = path.with_suffix(".unfinished")
            try:
                _write(texts, embedder, say, unfinished)
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
    return path


def _write(texts: Sequence[str], embedder: Embedder, say: Callable[[str], object], path: Path) -> None:
    import numpy as np

    faiss = load_faiss()
    vectors = np.empty((0, 0), np.float32)
    for start, part in _parts(texts, say):
        found = embedder.encode(part)
        if not start:
            vectors = np.empty((len(texts), found.shape[1]), np.float32)
        vectors[start : start + len(part)] = found
    clusters = max(1, min(len(texts) // _VECTORS_A_CLUSTER, _CLUSTERS_A_ROOT * isqrt(len(texts))))
    index = faiss.index_factory(vectors.shape[1], f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = clusters
    try:
        faiss.write_index(index, str(path))
        # FAISS ignores an error of its last write.
        _shape(path)
    except (RuntimeError, ValueError) as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"the index of the corpus ({vectors.nbytes:,} bytes and a few more) cannot be written into {path.parent}, "
            f"where {free:,} bytes are free: make room there, or give another cache folder (XDG_CACHE_HOME)"
        ) from error


def _parts(texts: Sequence[str], say: Callable[[str], object]) -> Iterator[tuple[int, Sequence[str]]]:
    told = 0
    for start in range(0, len(texts), _AT_ONCE):
        yield start, texts[start : start + _AT_ONCE]
        done = min(start + _AT_ONCE, len(texts))
        if _STEPS * done // len(texts) > told:
            told = _STEPS * done // len(texts)
            say(f"Embedded {done:,} of {len(texts):,} documents.")


def _digest(texts: Sequence[str], model: str) -> str:
    digest = sha256(_identity(model).encode("utf-8", "surrogatepass"))
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:32]


def _identity(model: str) -> str:
    folder = Path(model)
    if not folder.is_dir():
        return model
    # A model that was trained further has the same name.
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    states = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    return repr([str(folder.resolve()), *((name, state.st_size, state.st_mtime_ns) for name, state in states)])
