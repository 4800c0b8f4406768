"""Vectors of texts or at random, and an IVF index of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs
from ragorder.common.files import cache_folder
from ragorder.eval.data.retrieval import DenseRetriever
from ragorder.kernels.preprocessing.encoder import default_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragorder.eval.data.corpora import Corpus

    Vectors = NDArray[np.float32]

A_CENTROID = 40
"""Vectors of a sample."""


def clustered(count: int, dimensions: int, *, clusters: int, seed: int) -> Vectors:
    """Return vectors of length 1 around centres that are the same for all seeds."""
    import numpy as np

    centres = np.random.default_rng(0).standard_normal((clusters, dimensions), np.float32)
    rng = np.random.default_rng(seed + 1)
    noise = rng.standard_normal((count, dimensions), np.float32)
    vectors: Vectors = centres[rng.integers(clusters, size=count)] + noise
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def build_index(vectors: Vectors, nprobe: float, *, sampled: bool = False) -> Any:
    """Return an index by inner product in 4 sqrt(n) clusters; a large one is trained on a sample (`sampled`)."""
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    if not sampled:
        return index_of([vectors], clusters, vectors, nprobe)
    return index_of([vectors], clusters, vectors[:: max(1, len(vectors) // (clusters * A_CENTROID))], nprobe, niter=4)


def index_of(parts: Iterable[Vectors], clusters: int, train_on: Vectors, nprobe: float, **clustering: int) -> Any:
    """Return an index by inner product that searches a share of its clusters; `clustering`: as FAISS names it."""
    with needs("retrieval", "a real index"):
        import faiss
    size = train_on.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, clusters, faiss.METRIC_INNER_PRODUCT)
    for name, value in ({"min_points_per_centroid": 1} | clustering).items():
        setattr(index.cp, name, value)
    index.train(train_on)
    for part in parts:
        index.add(part)
    index.nprobe = max(1, round(nprobe * clusters))
    return index


def embedded(texts: Iterable[str]) -> Vectors:
    """Return the texts' vectors, which are kept in the user's cache."""
    return embed(list(texts), cache_folder())


def embed(texts: Sequence[str], cache: Path | None = None) -> Vectors:
    """Normalised embeddings, one row a text, kept in the folder `cache`. Raises ImportError, OSError for a model that
    cannot be loaded."""
    import numpy as np

    retriever = DenseRetriever(default_model())
    if cache is None:
        return np.ascontiguousarray(retriever.embed(texts), dtype=np.float32)
    digest = hashlib.sha256(retriever.name.encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    path = cache / f"vectors-{digest.hexdigest()[:16]}.npy"
    with suppress(OSError, ValueError):
        return np.load(path)  # type: ignore[no-any-return]
    vectors = np.ascontiguousarray(retriever.embed(texts), dtype=np.float32)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.npy")
    np.save(unfinished, vectors)
    unfinished.replace(path)
    return vectors


def nearest_documents(corpus: Corpus, by: str, count: int) -> list[list[int]]:
    """Return the documents most similar to each one, nearest first, as `by` says (see `ragorder fuse`)."""
    from ragorder.kernels.preprocessing.neighbours import make_neighbours

    choice = make_neighbours(by)
    vectors = choice.vectors([document.text for document in corpus.documents])
    return choice.nearest([document.id for document in corpus.documents], vectors, count)
