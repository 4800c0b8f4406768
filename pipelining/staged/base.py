"""What a staged search is: a search that tells what it has found so far, again and again, before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Stage", "StagedSearch"]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What was found up to the end of one stage. Its arrays are read-only and are not written to again.

    number: from 1 to `stages`, how many there are in this search
    ids: of shape (queries, k), best first; -1 where fewer than k were found
    distances: of the same shape, in the index's metric (for an inner product larger is better)
    """

    number: int
    stages: int
    ids: NDArray[np.int64]
    distances: NDArray[np.float32]

    def __post_init__(self) -> None:
        self.ids.flags.writeable = self.distances.flags.writeable = False

    @property
    def final(self) -> bool:
        """Whether this is the last stage, whose result is the search's."""
        return self.number == self.stages


class StagedSearch(Protocol):
    """A retriever that searches in stages.

    The iterator is lazy and does one stage's work in each `next()`, in a library that leaves the interpreter to other
    threads meanwhile: a driver may run each `next()` in any thread, one after another, and may drop the iterator
    between two. Several searches of one object may run at once.
    """

    def search(self, queries: Any, k: int) -> Iterator[Stage]:
        """Find the k nearest of each query, an array of shape (queries, dimensions); always at least one stage.

        The last stage is what a search without stages finds. Raises ValueError, before the iterator is returned, for
        `k` < 1 and for queries of another shape.
        """
