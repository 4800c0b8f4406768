"""Time of a batch by its size (RAGDoll Eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

_DECAY = 1 - 1 / 128
_OUTLIER = 4.0
_WARM = 16
# Variance of the sizes' logarithms below which all count as one size.
_ONE_SIZE = 1e-9
# Largest `c` that is learnt: noise between two similar sizes could give a power that overflows.
_STEEPEST = 16.0


class PowerLaw:
    """Seconds of a batch of B requests: T(B) = a * B^c, with a > 0 and c >= 0.

        law = PowerLaw.fit([(1, 2.1), (8, 5.0), (32, 11.8)])
        law(16)  # seconds

    Fitted by least squares in logarithms, with c at most 16.
    """

    def __init__(self, a: float, c: float = 1.0) -> None:
        if not 0 < a < math.inf or not 0 <= c < math.inf:
            raise ValueError(f"a power law has a > 0 and c >= 0, got a={a}, c={c}")
        self.a = a
        self.c = c
        self.samples = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float]]) -> Self:
        """Fit (size, seconds) of equal weight. Raises ValueError for fewer than two sizes."""
        samples = list(samples)
        if len({size for size, _ in samples}) < 2:
            raise ValueError("a power law takes at least two batch sizes: measure one more")
        law = cls(1.0)
        for size, seconds in samples:
            law._add(size, seconds, decay=1.0)
        law._solve()
        return law

    def __call__(self, size: int) -> float:
        return self.a * math.pow(size, self.c)

    def __repr__(self) -> str:
        return f"PowerLaw(a={self.a:.4g}, c={self.c:.4g})"

    def learn(self, size: int, seconds: float) -> None:
        """Learn from a batch; after 16, one counts at most four times the expected time or the mean."""
        expected = math.inf
        if self.samples >= _WARM and size > 0:
            # If `c` was learnt from noise, the expected time of a far smaller size would be almost 0.
            expected = max(self(size), math.exp(self._y / self._weight))
        self._add(size, min(seconds, _OUTLIER * expected) if seconds < math.inf else seconds, decay=_DECAY)
        self._solve()

    def _add(self, size: int, seconds: float, *, decay: float) -> None:
        if not 0 < size < math.inf or not 0 < seconds < math.inf:
            raise ValueError(f"a batch has a positive size and time, got {size} requests in {seconds} s")
        x, y = math.log(size), math.log(seconds)
        self.samples += 1
        self._weight = self._weight * decay + 1
        self._x = self._x * decay + x
        self._y = self._y * decay + y
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * y

    def _solve(self) -> None:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > _ONE_SIZE:
            self.c = min(_STEEPEST, max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance))
        self.a = math.exp(mean_y - self.c * mean_x)
