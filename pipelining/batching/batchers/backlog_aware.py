"""Batches of the size with the lowest mean latency for the present backlog (RAGDoll section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ragorder.pipelining.batching.backlog import best_batch
from ragorder.pipelining.batching.batchers.base import Backlog
from ragorder.pipelining.batching.power_law import PowerLaw

__all__ = ["BacklogAware"]

# Where weights or partitions are read for each batch, its time grows slower than the threshold of Eq. 8.
_PRIOR = 1.0, 0.5
# The choice for a longer backlog is that for so many batches of the largest size: it takes bounded time.
_BATCHES = 4
_ARRIVALS = 32
# Choices are kept until `c` has changed by as much.
_DIGITS = 2


class BacklogAware:
    """Batches by the backlog: `best_batch` with a `PowerLaw` that is learnt while they run.

        BacklogAware(PowerLaw.fit(profiled), most=64)

    - `seconds`: of a batch by its size; a `PowerLaw` goes on learning, another function stays as it is
    - `most`: the largest batch, chosen from powers of two and this; or `sizes` to choose from

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        seconds: Callable[[int], float] | None = None,
        *,
        most: int = 64,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        if sizes is None:
            sizes = (*(1 << power for power in range(most.bit_length())), most)
        elif not sizes or min(sizes) < 1:
            raise ValueError(f"sizes must be at least 1, and there must be one, got {list(sizes)}")
        self.seconds = PowerLaw(*_PRIOR) if seconds is None else seconds
        self.most = max(sizes)
        self._sizes = sorted(set(sizes))
        self._chosen: dict[int, int] = {}

    def size(self, backlog: Backlog) -> int:
        waiting = max(1, min(backlog.unfinished, _BATCHES * self.most))
        if backlog.arrivals_s:
            return best_batch(waiting, self.seconds, self._sizes, sorted(backlog.arrivals_s)[:_ARRIVALS])
        if waiting not in self._chosen:
            self._chosen[waiting] = best_batch(waiting, self.seconds, self._sizes)
        return self._chosen[waiting]

    def learn(self, size: int, seconds: float) -> None:
        law = self.seconds
        if not isinstance(law, PowerLaw) or size < 1 or not 0 < seconds < math.inf:
            return
        before = round(law.c, _DIGITS)
        law.learn(size, seconds)
        # `a` multiplies the times of all splits alike.
        if round(law.c, _DIGITS) != before:
            self._chosen.clear()
