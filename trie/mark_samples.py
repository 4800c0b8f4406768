"""Requests that are watched, to learn how often their prefixes are asked for again."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import NamedTuple

from ragorder.trie.mark_rates import MarkRates
from ragorder.trie.tree import Key

__all__ = ["MarkSamples"]

# Watched at once in a scope; half of them may be as young as they like.
_SAMPLES = 256


class _Sample(NamedTuple):
    """The documents of a request from the first on, those `cells` behind its cached ones."""

    started: float
    keys: tuple[Key, ...]
    cached: int
    cells: list[int]


class MarkSamples:
    """Some of a scope's requests, each for one life of an entry: `rates` learns which of them come again."""

    def __init__(self, rates: MarkRates) -> None:
        self._rates = rates
        self._samples: deque[_Sample] = deque()
        self._sampled = float("-inf")

    def copy(self, rates: MarkRates) -> MarkSamples:
        """One that teaches other rates."""
        copy = MarkSamples(rates)
        copy._samples, copy._sampled = self._samples.copy(), self._sampled
        return copy

    def close(self, now: float) -> None:
        """The scope is forgotten."""
        while self._samples:
            self._end_first(now)

    def observe(self, asked: Set[Key], now: float) -> None:
        """A request for documents."""
        samples, rates = self._samples, self._rates
        while samples and samples[0].started <= now - rates.life_s:
            self._end_first(now)
        for sample in samples:
            for place, key in enumerate(sample.keys):
                if key not in asked:
                    break
                if place >= sample.cached:
                    rates.passed(sample.cells[place - sample.cached])

    def add(self, keys: tuple[Key, ...], cached: int, cells: list[int], now: float) -> None:
        """Watch a request whose first `cached` documents can be read already, if there are not too many."""
        samples, rates = self._samples, self._rates
        sparse = len(samples) < _SAMPLES // 2 or now >= self._sampled + 2 * rates.life_s / _SAMPLES
        if len(samples) < _SAMPLES and sparse:
            samples.append(_Sample(now, keys, cached, cells))
            rates.begin(cells, now)
            self._sampled = now

    def _end_first(self, now: float) -> None:
        sample = self._samples.popleft()
        self._rates.end(sample.cells, sample.started, now)
