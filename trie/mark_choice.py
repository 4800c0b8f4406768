"""Choice of the marks that a request sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder.trie.cache_rules import CacheRules
from ragorder.trie.cohorts import Cohorts
from ragorder.trie.mark_rates import MarkRates, WriteBudget, cell_of
from ragorder.trie.tree import Key

__all__ = ["MarkChoice", "best_marks"]

# Samples watched at once in a scope; half of them may be as young as they like.
_SAMPLES = 256
# Documents behind what is cached among which marks are chosen.
_PLACES = 24


class _Sample(NamedTuple):
    """The documents of a request from the first on, those `cells` behind its cached ones."""

    started: float
    keys: tuple[Key, ...]
    cached: int
    cells: list[int]


class MarkChoice:
    """Chooses marks by the reads that they are expected to bring, for one scope.

        choice = MarkChoice(rules, MarkRates(rules.ttl_s), WriteBudget())
        choice.choose(["a", "b"], [600, 1200, 1800], held=0, live=(), prompt_tokens=1860, now=0.0)

    Expected are as many requests as have contained the documents up to a mark within the last life of an entry, at the
    rate at which such counts have come true. A mark costs what writing adds to the price of the tokens up to it, and
    saves what reading takes off, for each request that resumes there.
    """

    def __init__(self, rules: CacheRules, rates: MarkRates, budget: WriteBudget) -> None:
        self.rules = rules
        self.budget = budget
        self._rates = rates
        self._cohorts = Cohorts()
        self._times: deque[float] = deque()
        self._samples: deque[_Sample] = deque()
        self._sampled = float("-inf")

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.budget, copy._rates, copy._cohorts = self.budget.copy(), self._rates.copy(), self._cohorts.copy()
        copy._times, copy._samples = self._times.copy(), self._samples.copy()
        return copy

    def close(self, now: float) -> None:
        """Its scope is forgotten."""
        while self._samples:
            sample = self._samples.popleft()
            self._rates.end(sample.cells, sample.started, now)

    def choose(
        self, keys: Sequence[Key], ends: Sequence[int], held: int, live: Sequence[int], prompt_tokens: int, now: float
    ) -> tuple[int, ...]:
        """The marks of a request, as numbers of documents in front of each, ascending; it counts from the next one on.

        `ends[i]`: tokens up to the end of document i, and `ends[0]` those in front of the first. The request resumes
        behind `held` documents (-1: nowhere); `live` are other entries on its path.
        """
        counts = self._counts(keys, now)
        expected = self._expected(counts, held, now)
        self._observe(keys, counts, held, now)
        rules = self.rules
        marks = [held] if held >= 0 else []
        free = rules.marks - len(marks)
        long_enough = [place for place in range(len(expected)) if ends[place] >= rules.minimum_tokens]
        base = ends[held] if held >= 0 else 0
        extra, saved = rules.write - 1, 1 - rules.read
        gains = {place: saved * expected[place] - extra for place in long_enough if place > held}
        new = best_marks(ends, gains, base, free - (held > 0 and free > 1))
        while new and not self.budget.allows(extra * (ends[new[-1]] - base), prompt_tokens):
            new = new[:-1]
        marks += new
        free -= len(new)
        # Marks within what is cached cost nothing: where most requests part from this one, then those that live.
        inner = [place for place in long_enough if place < held]
        parting = [place for place in inner if counts[place] > counts[place + 1]][:_PLACES]
        marks += best_marks(ends, {place: float(counts[place] - counts[held]) for place in parting}, 0, free)
        for place in (*inner[:1], *sorted(live, reverse=True)):
            if place < held and place not in marks and len(marks) < rules.marks:
                marks.append(place)
        return tuple(sorted(marks))

    def _counts(self, keys: Sequence[Key], now: float) -> list[int]:
        """Requests within the last life that contain no document, the first, the first two, …"""
        times, oldest = self._times, now - self._rates.life_s
        while times and times[0] <= oldest:
            times.popleft()
        recent = min(len(times), len(self._cohorts))
        votes = self._cohorts.latest(recent)
        counts = [recent]
        masks = self._cohorts.masks
        for key in keys[: _PLACES * 4]:
            votes &= masks.get(key, 0)
            if not votes:
                break
            counts.append(votes.bit_count())
        return counts + [0] * (len(keys) + 1 - len(counts))

    def _expected(self, counts: Sequence[int], held: int, now: float) -> list[float]:
        """Reads of each mark: no more than of one in front of it."""
        rates, found = self._rates, []
        least = float("inf")
        start = max(held, 0)
        for place, count in enumerate(counts[: start + 1 + _PLACES]):
            if place > start:
                least = min(least, rates.expected(cell_of(count, place - start), now))
            else:
                # What is cached is not written; the system prompt is in all requests.
                least = max(float(count), rates.expected(cell_of(count, 0), now))
            found.append(least)
        return found

    def _observe(self, keys: Sequence[Key], counts: Sequence[int], held: int, now: float) -> None:
        samples, rates = self._samples, self._rates
        while samples and samples[0].started <= now - rates.life_s:
            sample = samples.popleft()
            rates.end(sample.cells, sample.started, now)
        asked = frozenset(keys)
        for sample in samples:
            for place, key in enumerate(sample.keys):
                if key not in asked:
                    break
                if place >= sample.cached:
                    rates.passed(sample.cells[place - sample.cached])
        cached = max(held, 0)
        sparse = len(samples) < _SAMPLES // 2 or now >= self._sampled + 2 * rates.life_s / _SAMPLES
        if cached < len(keys) and len(samples) < _SAMPLES and sparse:
            shown = tuple(keys[: cached + _PLACES])
            cells = [cell_of(counts[place], place - cached) for place in range(cached + 1, len(shown) + 1)]
            samples.append(_Sample(now, shown, cached, cells))
            rates.begin(cells, now)
            self._sampled = now
        self._cohorts.add(keys)
        self._times.append(now)
        if len(self._times) > self._cohorts.size:
            self._times.popleft()


def best_marks(ends: Sequence[int], gains: Mapping[int, float], base: int, slots: int) -> tuple[int, ...]:
    """At most `slots` of the places in `gains`, ascending, that gain most; none if none gains.

    A mark at a place gains `gains[place]` for each token between the mark before it, or `base`, and `ends[place]`.
    """
    best = 0.0
    chosen: tuple[int, ...] = ()
    layer: dict[int, tuple[float, tuple[int, ...]]] = {
        place: ((ends[place] - base) * gain, (place,)) for place, gain in gains.items()
    }
    for _ in range(slots):
        for gain, marks in layer.values():
            if gain > best:
                best, chosen = gain, marks
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for place, rate in gains.items():
            for former, (gain, marks) in layer.items():
                if former < place:
                    found = gain + (ends[place] - ends[former]) * rate
                    if place not in following or found > following[place][0]:
                        following[place] = found, (*marks, place)
        layer = following
    return chosen
