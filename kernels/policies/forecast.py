"""Expected uses, in the orderer's forecast."""

from __future__ import annotations

from math import log

from ragorder.kernels.policies.base import TierNode, policies

__all__ = ["Forecast"]

# By simulation: at 0.3 bursts are lost, at 1 what is popular (docs/tiers.md).
_FORGETTING = 0.5
_LEAST_COST = 1e-12


@policies.register("forecast", "as often as the orderer expects them to be used, else as often as they were")
class Forecast:
    """log(Uses x Cost / Size) + 0.5 x Turnovers: uses count less by a constant factor for each time that the tier has
    been replaced since.

    Uses are those that the last request forecast, otherwise the frequency. Turnovers are measured in evicted sizes by
    the used one, so tiers of any size and speed forget alike.
    """

    def __init__(self) -> None:
        self._turnovers = 0.0

    def priority(self, node: TierNode) -> float:
        uses = node.expected or max(node.frequency, 1)
        return log(uses * max(node.cost, _LEAST_COST)) + _FORGETTING * self._turnovers

    def evicted(self, node: TierNode, used: int) -> None:
        self._turnovers += node.size / max(used, 1)
