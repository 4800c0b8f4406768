"""Time budget of a piece (HedraRAG section 4.2)."""

from __future__ import annotations

import math
from typing import NamedTuple

from ragorder.pipelining.running_mean import RunningMean

__all__ = ["Budget", "PieceLimit"]

_LARGEST_OVERHEAD = 0.02
_LEAST_CLUSTERS = 16
_FIRST_OVERHEAD_S = 1e-4
_OUTLIER = 4.0


class PieceLimit(NamedTuple):
    """Seconds that each core scans in a piece. `whole`: searches are not cut."""

    seconds: float
    whole: bool


class Budget:
    """How long a piece lasts: mb = sqrt(2 * overhead * search), the maximum of Eq. 1's gain with the minus that its
    text means (as printed, with a plus, it has none inside):

        gain(mb) = (search - mb) / 2 - search / mb * overhead

    - `overhead_s`: of a piece beside its scan (β); None: the mean of those measured
    - search is its time on all cores: a piece's clusters are dealt to them, one search's too
    - it grows with the searches that wait for a core, by 1 + waiting / cores
    - the overhead is at most 2 % of the time: what comes later is served later, so pieces shorten no wait among equals,
      and only show results earlier
    - while searches wait, several cores have 16 clusters each: fewer cannot be dealt out evenly
    - searches shorter than two such pieces are not cut, others into equal pieces

    Raises ValueError for an overhead that is not positive and finite.
    """

    def __init__(self, overhead_s: float | None = None) -> None:
        if overhead_s is not None and not 0 < overhead_s < math.inf:
            raise ValueError(f"overhead_s must be positive seconds, got {overhead_s}")
        self._given = overhead_s
        self._measured = RunningMean(arithmetic_start=True)

    @property
    def overhead_s(self) -> float:
        if self._given is not None:
            return self._given
        return self._measured.value or _FIRST_OVERHEAD_S

    def learn(self, overhead_s: float) -> None:
        """A piece that the operating system interrupted counts at most four times what was expected."""
        expected = self._measured.value
        self._measured.add(min(max(0.0, overhead_s), _OUTLIER * expected if expected else math.inf))

    def limit(self, search_s: float, waiting: int, cores: int, cluster_s: float = 0.0) -> PieceLimit:
        """`search_s`: mean time of a whole search on one core, `cluster_s` of one cluster; `waiting`: due searches
        behind the first."""
        overhead_s, search_s = self.overhead_s, search_s / cores
        seconds = math.sqrt(2 * overhead_s * search_s) * (1 + waiting / cores)
        seconds = max(seconds, overhead_s / _LARGEST_OVERHEAD)
        if waiting and cores > 1:
            seconds = max(seconds, min(search_s, _LEAST_CLUSTERS * cluster_s))
        pieces = int(search_s / seconds)
        return PieceLimit(search_s / pieces, whole=False) if pieces > 1 else PieceLimit(max(search_s, seconds), True)
