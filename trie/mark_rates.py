"""Expected reads of what a request writes into a cache, and the money at risk."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy as shallow_copy
from typing import Self

__all__ = ["CELLS", "TURN_END", "MarkRates", "WriteBudget", "cell_of"]

_COUNTS = 5
_PLACES = 11
CELLS = _COUNTS * _PLACES
TURN_END = CELLS
"""The cell of the ends of conversations' turns, at which the next ones resume."""

# Reads expected before anything is learnt: of prefixes that so many requests (0, 1, 2 or 3, 4 to 7, more) have asked
# for within the last life of an entry, each further document is in fewer requests; and of the end of a turn.
_FIRST = (0.5, 0.75, 1.5, 3.0, 8.0, 1.0)
_NEXT = 0.85
_WEIGHT = 1.0
_MOST = 50.0
_DECAY = 0.99
# Lives beyond this are learnt from this part of them.
_LONGEST_S = 3600.0

_SHARE = 0.015
_PROMPTS = 4


def cell_of(count: int, places: int) -> int:
    """Prefixes that are alike: `count` requests asked for them, and they end `places` documents behind the cached
    ones."""
    return min(count.bit_length(), _COUNTS - 1) * _PLACES + min(places, _PLACES - 1)


class MarkRates:
    """Expected requests that contain a prefix's documents within the life of an entry (`ttl_s`), by cell.

        rates = MarkRates(300)
        rates.begin([cell_of(0, 1), cell_of(0, 2)], started=0.0)
        rates.passed(cell_of(0, 1))
        rates.expected(cell_of(0, 1), now=20.0)

    Learnt from samples, of which those that are still young count with their share of a life.
    """

    def __init__(self, ttl_s: float) -> None:
        self.life_s = min(ttl_s, _LONGEST_S)
        self._reads = [0.0] * (CELLS + 1)
        self._lives = [0.0] * (CELLS + 1)
        # Of the samples that are still watched: their number, and the sum of their starts.
        self._open = [0] * (CELLS + 1)
        self._starts = [0.0] * (CELLS + 1)

    def expected(self, cell: int, now: float) -> float:
        count, place = divmod(cell, _PLACES)
        prior = _FIRST[count] * _NEXT ** max(0, place - 1)
        young = (self._open[cell] * now - self._starts[cell]) / self.life_s
        return (_WEIGHT * prior + self._reads[cell]) / (_WEIGHT + self._lives[cell] + max(0.0, young))

    def begin(self, cells: Iterable[int], started: float) -> None:
        for cell in cells:
            self._open[cell] += 1
            self._starts[cell] += started

    def passed(self, cell: int) -> None:
        self._reads[cell] += 1

    def end(self, cells: Iterable[int], started: float, now: float) -> None:
        life = min(1.0, max(0.0, (now - started) / self.life_s))
        for cell in cells:
            self._open[cell] -= 1
            # Rounding must not add up over months.
            self._starts[cell] = self._starts[cell] - started if self._open[cell] else 0.0
            self._lives[cell] += life
            if self._lives[cell] > _MOST:
                self._lives[cell] *= _DECAY
                self._reads[cell] *= _DECAY

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._reads, copy._lives = list(self._reads), list(self._lives)
        copy._open, copy._starts = list(self._open), list(self._starts)
        return copy


class WriteBudget:
    """What may be spent on writes, in input tokens at the plain price.

    However badly reads are predicted, prompts never cost more than 1.5 % more than without a cache, and eight prompts:
    of what reads have saved, four prompts at most are kept for writes, and so many are lent.
    """

    def __init__(self) -> None:
        self.balance = 0.0

    def allows(self, surcharge: float, prompt_tokens: float) -> bool:
        return surcharge <= self.balance + _PROMPTS * prompt_tokens

    def add(self, plain: float, cost: float) -> None:
        """A prompt of `plain` tokens that costs `cost`."""
        self.balance = min(self.balance + (1 + _SHARE) * plain - cost, _PROMPTS * plain)

    def correct(self, excess: float) -> None:
        """It costs so much more than was thought."""
        self.balance -= excess

    def copy(self) -> Self:
        return shallow_copy(self)
