"""Whether a speculation is likely to save more than it may cost."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.pipelining.mean import Mean

__all__ = ["Odds"]


class Odds:
    """Learns from every search, speculated on or not, how often what it had after a stage was what it had in the end,
    and how long it went on.

    A speculation on the right documents saves what is left of the search, and no more than a prefill. One on the wrong
    documents may keep the engine busy beyond the search: an iteration that has begun is not broken off.
    """

    def __init__(self) -> None:
        # Of each stage how often it was right, and how many seconds were left.
        self._stages: list[tuple[Mean, Mean]] = []

    def learn(self, stages: Sequence[tuple[bool, float]]) -> None:
        """A search has ended. Of each stage: whether its documents were the final ones, how many seconds were left."""
        for number, seen in enumerate(stages):
            if number == len(self._stages):
                self._stages.append((Mean(), Mean()))
            for mean, value in zip(self._stages[number], seen, strict=True):
                mean.learn(value)

    def favour(self, stage: int, prefill_s: float | None) -> bool:
        """Whether a speculation after this stage, from 1, saves time on average. As long as nobody knows: yes."""
        right, left_s = (mean.value for mean in self._stages[stage - 1]) if stage <= len(self._stages) else (None, None)
        if prefill_s is None or right is None or left_s is None:
            return True
        return right * min(left_s, prefill_s) >= (1 - right) * max(0.0, prefill_s - left_s)
