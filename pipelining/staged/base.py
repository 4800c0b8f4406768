"""Interface of a staged search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Results after a stage, in read-only arrays.

    - `number`: 1 to `stages`; in a shared search the clusters scanned so far (0: results of earlier searches)
    - `ids`: (queries, k), best first; -1 if fewer were found
    - `distances`: in the index's metric (inner product: larger is better)
    - `settled`: clusters, at least, scanned since `ids` changed
    """

    number: int
    stages: int
    ids: NDArray[np.int64]
    distances: NDArray[np.float32]
    settled: int = 0

    def __post_init__(self) -> None:
        self.ids.flags.writeable = self.distances.flags.writeable = False

    @property
    def final(self) -> bool:
        return self.number == self.stages


class StagedSearch(Protocol):
    """Each `next()` does one stage's work, in any thread, and releases the interpreter lock."""

    def search(self, queries: Any, k: int) -> Iterator[Stage]:
        """Return the k nearest of `queries`, (queries, dimensions); the last stage equals an unstaged search."""
