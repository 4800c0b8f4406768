"""Cost of scanning clusters, learnt online (HedraRAG Figure 6b)."""

from __future__ import annotations

__all__ = ["ClusterCosts"]

_DECAY = 1 - 1 / 128
_OUTLIER = 4.0
_WARM = 16


class ClusterCosts:
    """Seconds of a call that scans `codes` vectors on one core: call_s + code_s x codes.

    Least squares, in which each later call takes 1/128 off the weight of the earlier ones. Calls of one size cost
    nothing but their codes. A call that the operating system interrupted counts at most four times what was expected.
    """

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
        # With the weight of one call: through the origin, which is all that calls of one size say.
        prior, proportional = mean_x * mean_x, mean_y / mean_x
        slope = self._xy - self._x * mean_y + prior * proportional
        slope /= self._xx - self._x * mean_x + prior
        self.code_s = slope if 0 < slope < proportional else proportional
        self.call_s = mean_y - self.code_s * mean_x
