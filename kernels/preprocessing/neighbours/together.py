"""Neighbours by joint requests in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Self

from ragorder.common.jsonl import JSONLines
from ragorder.common.request_lines import EXAMPLE, RequestLine
from ragorder.kernels.preprocessing.neighbours.base import Neighbours, neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ServedTogether"]


@neighbours.register("log", "most often in the same requests of a log (log:FILE, JSON lines as for `ragorder replay`)")
class ServedTogether(Neighbours):
    """Documents that share the most requests with one document. Ties go to the earlier document; documents without a
    logged request have no neighbours.

    `requests` has the ids of each request's documents.
    """

    def __init__(self, requests: Iterable[Iterable[str]]) -> None:
        self._together: dict[str, Counter[str]] = {}
        for request in requests:
            for one, other in permutations(dict.fromkeys(request), 2):
                self._together.setdefault(one, Counter())[other] += 1

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        """Raises JSONLinesError naming file and line."""
        if not argument:
            raise ValueError("give the log of requests: log:FILE")
        lines = JSONLines(argument, example=EXAMPLE)
        return cls(map(str, request.ids) for _, request in lines.read(RequestLine))

    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        places = {id: place for place, id in enumerate(ids)}
        found: list[list[int]] = []
        for id in ids:
            uses = self._together.get(id, Counter[str]())
            known = ((-times, places[other]) for other, times in uses.items() if other in places)
            found.append([place for _, place in sorted(known)[:count]])
        return found
