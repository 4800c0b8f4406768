"""Costs of scanning clusters, learnt online (HedraRAG Figure 6b)."""

from __future__ import annotations

import math
from typing import NamedTuple

from ragorder.common.running_mean import RunningMean

_DECAY = 1 - 1 / 128
_OUTLIER = 4.0
_WARM = 16


class ClusterCosts:
    """Seconds of a call that scans `codes` vectors on one core, by decayed least squares."""

    def __init__(self, code_s: float, call_s: float = 5e-5) -> None:
        self.call_s = call_s
        self.code_s = code_s
        self.calls = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def seconds(self, codes: float) -> float:
        return self.call_s + self.code_s * codes

    def learn(self, codes: int, seconds: float) -> None:
        if codes <= 0 or seconds <= 0:
            return
        if self.calls >= _WARM:
            seconds = min(seconds, _OUTLIER * self.seconds(codes))
        self.calls += 1
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + codes
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + codes * codes
        self._xy = self._xy * _DECAY + codes * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        # A prior of one call's weight for a line through the origin, which is all that calls of one size determine.
        prior, proportional = mean_x * mean_x, mean_y / mean_x
        slope = self._xy - self._x * mean_y + prior * proportional
        slope /= self._xx - self._x * mean_x + prior
        self.code_s = slope if 0 < slope < proportional else proportional
        self.call_s = mean_y - self.code_s * mean_x


_LARGEST_OVERHEAD = 0.02
_LEAST_CLUSTERS = 16
_FIRST_OVERHEAD_S = 1e-4


class PieceLimit(NamedTuple):
    """Seconds of each core in a piece. `whole`: searches are not cut."""

    seconds: float
    whole: bool


class Budget:
    """Duration of a piece: mb = sqrt(2 * overhead * search), where Eq. 1's gain is largest.

    The gain is (search - mb) / 2 - search / mb * overhead (the paper prints a plus). `overhead_s` (β; None: the
    measured mean) is a piece's time without the scan, at most 2 % of all. While searches wait, each core gets at least
    16 clusters.
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
        expected = self._measured.value
        self._measured.add(min(max(0.0, overhead_s), _OUTLIER * expected if expected else math.inf))

    def limit(self, search_s: float, waiting: int, cores: int, cluster_s: float = 0.0) -> PieceLimit:
        overhead_s, search_s = self.overhead_s, search_s / cores
        seconds = math.sqrt(2 * overhead_s * search_s) * (1 + waiting / cores)
        seconds = max(seconds, overhead_s / _LARGEST_OVERHEAD)
        if waiting and cores > 1:
            seconds = max(seconds, min(search_s, _LEAST_CLUSTERS * cluster_s))
        pieces = int(search_s / seconds)
        return PieceLimit(search_s / pieces, whole=False) if pieces > 1 else PieceLimit(max(search_s, seconds), True)
