"""Sizes of the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ragorder.pipelining.batching import Backlog, BacklogAware, PowerLaw

__all__ = ["SIZES", "BacklogSizes", "FixedSizes", "RateSizes", "Sizes"]

SIZES = (8, 16, 32, 48, 64)


class Sizes(Protocol):
    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        """How many of the waiting requests to serve now; 0: wait for others, unless no other will come (`last`)."""

    def learn(self, size: int, seconds: float) -> None:
        """What a batch took."""


class FixedSizes:
    """Full batches of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        if waiting < self.size and not last:
            return 0
        return min(waiting, self.size)

    def learn(self, size: int, seconds: float) -> None:
        pass


class RateSizes:
    """Full batches of four minutes' requests, at most `most` (RAGDoll section 6.1: 4 x rate). `rate`: requests a minute
    at a time."""

    def __init__(self, rate: Callable[[float], float], most: int) -> None:
        self._rate = rate
        self._most = most

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        size = min(self._most, max(1, round(4 * self._rate(now_s))))
        return FixedSizes(size).next(waiting, now_s, last=last)

    def learn(self, size: int, seconds: float) -> None:
        pass


class BacklogSizes:
    """The best size for what waits (RAGDoll Eq. 4 to 8), by times that are profiled first and learnt then."""

    def __init__(self, seconds: Callable[[int], float], most: int, sizes: Sequence[int] = SIZES) -> None:
        chosen = sorted({min(size, most) for size in sizes})
        # A law takes two sizes.
        profiled = chosen if len(chosen) > 1 else sorted({1, 2, *chosen})
        self.batcher = BacklogAware(PowerLaw.fit([(size, seconds(size)) for size in profiled]), sizes=chosen)

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        return self.batcher.size(Backlog(waiting))

    def learn(self, size: int, seconds: float) -> None:
        self.batcher.learn(size, seconds)
