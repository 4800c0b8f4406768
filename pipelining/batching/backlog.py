"""Size of the next batch by the backlog (RAGDoll section 4.4, Eq. 5 to 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["best_batch"]


def best_batch(
    waiting: int, seconds: Callable[[int], float], sizes: Sequence[int], arrivals_s: Sequence[float] = ()
) -> int:
    """How many of the waiting requests to serve next, so that mean latency is lowest.

    - `seconds`: of a batch by its size, such as a `PowerLaw`
    - `sizes`: to choose from, in any order; fewer are taken where fewer wait
    - `arrivals_s`: when further requests are expected, in seconds from now

    The paper compares equal batches (Eq. 6). Here later batches may be of other sizes, the last one is of what is left,
    and called before each batch this gives the lowest sum of all. With `arrivals_s` each size is tried for the next
    batch, followed by the best sizes for what waits then. Among equals the largest. Since when requests have waited
    changes nothing: it is a constant of the sum. Takes time by backlog times sizes. Raises ValueError for no requests,
    no sizes, and sizes, times or arrivals out of range.
    """
    if waiting < 1:
        raise ValueError(f"a batch takes at least one waiting request, got {waiting}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be at least 1, and there must be one, got {list(sizes)}")
    if not all(0 <= at_s < math.inf for at_s in arrivals_s):
        raise ValueError("arrivals_s must be seconds from now")
    backlog = _Backlog(waiting + len(arrivals_s), seconds, sorted(set(sizes), reverse=True))
    arrivals = sorted(arrivals_s)
    return min(backlog.choices(waiting), key=lambda first: backlog.sum_s(waiting, first, arrivals))


class _Backlog:
    """The best batch for each number of waiting requests up to `most`, if no other comes."""

    def __init__(self, most: int, seconds: Callable[[int], float], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._seconds = [0.0, *(seconds(size) for size in range(1, min(most, sizes[0]) + 1))]
        if not all(0 < each < math.inf for each in self._seconds[1:]):
            raise ValueError("seconds must be positive and finite for every size up to the largest")
        self._best = [0]
        rest_s = [0.0]
        for count in range(1, most + 1):
            # Everything that waits, waits for this batch.
            sum_s, best = min(
                (count * self._seconds[size] + rest_s[count - size], -size) for size in self.choices(count)
            )
            self._best.append(-best)
            rest_s.append(sum_s)

    def choices(self, waiting: int) -> list[int]:
        """The largest first."""
        return list(dict.fromkeys(min(size, waiting) for size in self._sizes))

    def sum_s(self, waiting: int, first: int, arrivals_s: Sequence[float]) -> float:
        """Times from now at which all are answered, added up."""
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
