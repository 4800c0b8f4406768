"""Embeddings of a corpus, made once on a machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ragorder.eval.data.retrieval import DenseRetriever, default_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

__all__ = ["embed"]


def embed(texts: Sequence[str], cache: Path | None = None) -> Vectors:
    """Normalised embeddings, one row a text, as `DenseRetriever` makes them; `cache` is a folder that keeps them.

    Raises ImportError naming the extra to install, OSError for a model that cannot be loaded.
    """
    import numpy as np

    retriever = DenseRetriever(default_model())
    if cache is None:
        return np.ascontiguousarray(retriever._embed(texts), dtype=np.float32)
    digest = hashlib.sha256(retriever.name.encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    path = cache / f"vectors-{digest.hexdigest()[:16]}.npy"
    with suppress(OSError, ValueError):
        return np.load(path)  # type: ignore[no-any-return]
    vectors = np.ascontiguousarray(retriever._embed(texts), dtype=np.float32)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.npy")
    np.save(unfinished, vectors)
    unfinished.replace(path)
    return vectors
