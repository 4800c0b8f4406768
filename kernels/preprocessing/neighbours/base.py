"""Base class and registry of choices of neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from ragorder.trie.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Neighbours", "make_neighbours", "neighbours"]


class Neighbours(ABC):
    """For each document, other documents that are likely to be retrieved with it.

    @neighbours.register("next", "the documents that follow in the corpus")
    class NextNeighbours(Neighbours):
        def nearest(self, ids, vectors, count):
            return [list(range(place + 1, len(ids)))[:count] for place in range(len(ids))]
    """

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        """Make the choice for the argument after its name (`make_neighbours`). Raises ValueError for a wrong
        argument."""
        if argument is not None:
            raise ValueError(f"takes no argument, got {argument!r}: leave it out")
        return cls()

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """Return what `nearest` needs of these documents, shape (texts, dimensions), or None."""
        return None

    @abstractmethod
    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        """Return for each document the indices in `ids` of at most `count` different others, most related first.

        `vectors` are the result of `vectors`, in the order of the unique `ids`.
        """


neighbours: Registry[Neighbours] = Registry("neighbours")


def make_neighbours(source: str) -> Neighbours:
    """Raises ValueError for an unknown name or a wrong argument. `source` is NAME or NAME:ARGUMENT."""
    name, colon, argument = source.partition(":")
    choice = neighbours[neighbours.check(name)]
    try:
        return choice.from_argument(argument if colon else None)
    except ValueError as error:
        raise ValueError(f"neighbours {name}: {error}") from None
