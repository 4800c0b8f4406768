"""Interface of a choice of neighbours, and the registry of choices."""

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
    """The documents that are likely to be retrieved together with each.

    @neighbours.register("next", "the documents that follow in the corpus")
    class NextNeighbours(Neighbours):
        def nearest(self, ids, vectors, count):
            return [list(range(place + 1, len(ids)))[:count] for place in range(len(ids))]
    """

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        """The choice for the text behind its name (`make_neighbours`). Raises ValueError for a wrong one."""
        if argument is not None:
            raise ValueError(f"takes nothing after its name, got {argument!r}: leave it out")
        return cls()

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """What is kept of these documents for `nearest`, shape (texts, dimensions); None: nothing."""
        return None

    @abstractmethod
    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        """For each document the places of at most `count` different others in `ids`, the most related first.

        `vectors`: what `vectors` returned for them, in the order of `ids`, which are all different.
        """


neighbours: Registry[Neighbours] = Registry("neighbours")
"""Choices of neighbours by name."""


def make_neighbours(source: str) -> Neighbours:
    """The choice NAME or NAME:ARGUMENT. Raises ValueError for another name or a wrong argument."""
    name, colon, argument = source.partition(":")
    choice = neighbours[neighbours.check(name)]
    try:
        return choice.from_argument(argument if colon else None)
    except ValueError as error:
        raise ValueError(f"neighbours {name}: {error}") from None
