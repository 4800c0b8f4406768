"""Neighbours by similarity of given vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ragorder.common.extras import needs
from ragorder.kernels.preprocessing.neighbours.base import neighbours
from ragorder.kernels.preprocessing.neighbours.embedding import EmbeddingNeighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["VectorNeighbours"]


@neighbours.register("vectors", "by your own vectors (vectors:FILE.npy, one row per document)")
class VectorNeighbours(EmbeddingNeighbours):
    """`given` has shape (documents, dimensions), one row per document, in their order.

    Raises ValueError for another shape.
    """

    def __init__(self, given: NDArray[np.float32]) -> None:
        if given.ndim != 2:
            raise ValueError(f"vectors must have the shape (documents, dimensions), got {given.shape}")
        self._given = given

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        if not argument:
            raise ValueError("give the file of the vectors: vectors:FILE.npy")
        with needs("retrieval", "a file of vectors"):
            import numpy as np
        try:
            # Pickles are refused: they run code.
            given = np.load(Path(argument), allow_pickle=False)
            return cls(np.asarray(given, dtype=np.float32))
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise ValueError(f"{argument} has no vectors ({error}): write them with numpy.save") from None

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """Raises ValueError for another number of documents."""
        if len(texts) != len(self._given):
            raise ValueError(
                f"there are {len(self._given)} vectors for {len(texts)} documents: give one per document, in order"
            )
        return self._given
