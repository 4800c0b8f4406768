"""Neighbours by similarity of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from ragorder.common.extras import needs
from ragorder.kernels.preprocessing.encoder import TextEncoder
from ragorder.kernels.preprocessing.neighbours.base import Neighbours, neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["EmbeddingNeighbours"]


@neighbours.register("embedding", "by embeddings of sentence-transformers (embedding:MODEL for another than MiniLM)")
class EmbeddingNeighbours(Neighbours):
    """Documents with the highest cosine similarity, by exhaustive search (FAISS): n² / 2 products for n documents. Ties
    go to the earlier document."""

    def __init__(self, encoder: TextEncoder | None = None) -> None:
        self._encoder = encoder or TextEncoder()

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        if argument == "":
            raise ValueError("give a model after the colon, or leave out the colon")
        return cls(TextEncoder(argument))

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """Raises ImportError without sentence-transformers, OSError for the model."""
        return self._encoder.encode(texts)

    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        """Raises ImportError without FAISS, ValueError for vectors of another number or with NaN or inf."""
        if vectors is None or len(vectors) != len(ids):
            raise ValueError(f"{len(ids)} documents need one vector each, got {0 if vectors is None else len(vectors)}")
        if len(ids) < 2 or count < 1:
            return [[] for _ in ids]
        with needs("retrieval", "a search for neighbours"):
            import faiss
            import numpy as np
        unit = np.array(vectors, dtype=np.float32, order="C")
        if not np.isfinite(unit).all():
            raise ValueError("vectors must be finite numbers")
        faiss.normalize_L2(unit)
        index = faiss.IndexFlatIP(unit.shape[1])
        index.add(unit)
        # Each document also finds itself.
        scores, places = index.search(unit, min(count + 1, len(ids)))
        order = np.lexsort((places, -scores), axis=1)
        ranked = np.take_along_axis(places, order, axis=1).tolist()
        return [[other for other in row if other != place][:count] for place, row in enumerate(ranked)]
