"""Policies for the number of requests that run at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragorder.pipelining.power_law import PowerLaw


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests of a worker, and expected arrivals of others, in seconds from now."""

    waiting: int
    running: int = 0
    arrivals_s: Sequence[float] = ()

    @property
    def unfinished(self) -> int:
        return self.waiting + self.running


class Batcher(Protocol):
    def size(self, backlog: Backlog) -> int:
        """Return how many requests may run at once now, at least 1, given unfinished ones."""

    def learn(self, size: int, seconds: float) -> None:
        """Learn from a batch that has ended, or from one request with the mean number that ran with it."""


def best_batch(
    waiting: int, seconds: Callable[[int], float], sizes: Sequence[int], arrivals_s: Sequence[float] = ()
) -> int:
    """Return how many of the waiting requests to serve next for the lowest mean latency.

    - `seconds`: of a batch by its size, such as a `PowerLaw`
    - `sizes`: allowed ones; a batch is smaller if fewer requests wait
    - `arrivals_s`: expected arrivals, in seconds from now

    The paper compares equal batches (Eq. 6); here later ones may have other sizes. Among equals the largest size. Takes
    time proportional to backlog times sizes.
    """
    if waiting < 1:
        raise ValueError(f"waiting is {waiting}: a batch needs at least one waiting request")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes is {list(sizes)}: give one size or more, each at least 1")
    if not all(0 <= at_s < math.inf for at_s in arrivals_s):
        raise ValueError("arrivals_s must be finite seconds from now, 0 or more")
    backlog = _Backlog(waiting + len(arrivals_s), seconds, sorted(set(sizes), reverse=True))
    arrivals = sorted(arrivals_s)
    return min(backlog.choices(waiting), key=lambda first: backlog.sum_s(waiting, first, arrivals))


class _Backlog:
    """The best batch by waiting requests, up to `most`, without arrivals."""

    def __init__(self, most: int, seconds: Callable[[int], float], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._seconds = [0.0, *(seconds(size) for size in range(1, min(most, sizes[0]) + 1))]
        if not all(0 < each < math.inf for each in self._seconds[1:]):
            raise ValueError("seconds must be positive and finite for every size up to the largest")
        self._best = [0]
        rest_s = [0.0]
        for count in range(1, most + 1):
            # All waiting requests wait for this batch.
            sum_s, best = min(
                (count * self._seconds[size] + rest_s[count - size], -size) for size in self.choices(count)
            )
            self._best.append(-best)
            rest_s.append(sum_s)

    def choices(self, waiting: int) -> list[int]:
        return list(dict.fromkeys(min(size, waiting) for size in self._sizes))

    def sum_s(self, waiting: int, first: int, arrivals_s: Sequence[float]) -> float:
        now_s = sum_s = 0.0
        arrived, size = 0, first
        while True:
            now_s += self._seconds[size]
            sum_s += size * now_s
            waiting -= size
            if not waiting and arrived < len(arrivals_s):
                now_s = max(now_s, arrivals_s[arrived])
            while arrived < len(arrivals_s) and arrivals_s[arrived] <= now_s:
                arrived += 1
                waiting += 1
            if not waiting:
                return sum_s
            size = self._best[waiting]


class AllWaiting:
    """Batches of all waiting requests, at most `most`: RAGDoll's static ones (Table 2)."""

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise ValueError(f"most must be at least 1, or None, got {most}")
        self.most = most

    def size(self, backlog: Backlog) -> int:
        return backlog.unfinished if self.most is None else min(self.most, backlog.unfinished)

    def learn(self, size: int, seconds: float) -> None: ...


# The time of a batch that reads weights or partitions grows more slowly than the threshold of Eq. 8.
_PRIOR = 1.0, 0.5
# A longer backlog is treated as this many batches of the largest size, so that a choice takes bounded time.
_BATCHES = 4
_ARRIVALS = 32
# Choices are cached until `c` changes in this digit.
_DIGITS = 2


class BacklogAware:
    """Batches by backlog: `best_batch` with a `PowerLaw` that learns from each batch.

    - `seconds`: of a batch by its size; only a `PowerLaw` learns
    - `most`: the largest batch; sizes are powers of two and `most`, or `sizes`
    """

    def __init__(
        self, seconds: Callable[[int], float] | None = None, *, most: int = 64, sizes: Sequence[int] | None = None
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        if sizes is None:
            sizes = (*(1 << power for power in range(most.bit_length())), most)
        elif not sizes or min(sizes) < 1:
            raise ValueError(f"sizes is {list(sizes)}: give one size or more, each at least 1")
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
        # `a` scales all choices in the same way.
        if round(law.c, _DIGITS) != before:
            self._chosen.clear()
