"""Choice of a request's cache breakpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder.clouds.rules import CacheRules
from ragorder.trie.cohorts import Cohorts
from ragorder.trie.tree import Key

_COUNTS = 5
_RATED_PLACES = 11
CELLS = _COUNTS * _RATED_PLACES
TURN_END = CELLS
"""Cell of the ends of turns, where the next turns resume."""

# Reads expected before anything is learned: for prefixes requested 0, 1, 2 or 3, 4 to 7, or more times within one TTL
# (each further document is in fewer requests), and for the end of a turn.
_FIRST = (0.5, 0.75, 1.5, 3.0, 8.0, 1.0)
_NEXT = 0.85
_WEIGHT = 1.0
_MOST = 50.0
_DECAY = 0.99
# Of longer TTLs only this part is observed.
_LONGEST_S = 3600.0

_SHARE = 0.015
_PROMPTS = 4


def cell_of(count: int, places: int) -> int:
    return min(count.bit_length(), _COUNTS - 1) * _RATED_PLACES + min(places, _RATED_PLACES - 1)


class MarkRates:
    """Expected requests that contain a prefix's documents within an entry's TTL (`ttl_s`), by cell.

    Learned from samples; younger ones count with their share of the TTL.
    """

    def __init__(self, ttl_s: float) -> None:
        self.window_s = min(ttl_s, _LONGEST_S)
        self._reads = [0.0] * (CELLS + 1)
        self._observed = [0.0] * (CELLS + 1)
        # Number of the samples still observed, and the sum of their start times.
        self._open = [0] * (CELLS + 1)
        self._starts = [0.0] * (CELLS + 1)

    def expected(self, cell: int, now: float) -> float:
        count, place = divmod(cell, _RATED_PLACES)
        prior = _FIRST[count] * _NEXT ** max(0, place - 1)
        young = (self._open[cell] * now - self._starts[cell]) / self.window_s
        return (_WEIGHT * prior + self._reads[cell]) / (_WEIGHT + self._observed[cell] + max(0.0, young))

    def begin(self, cells: Iterable[int], started: float) -> None:
        for cell in cells:
            self._open[cell] += 1
            self._starts[cell] += started

    def passed(self, cell: int) -> None:
        self._reads[cell] += 1

    def end(self, cells: Iterable[int], started: float, now: float) -> None:
        share = min(1.0, max(0.0, (now - started) / self.window_s))
        for cell in cells:
            self._open[cell] -= 1
            # Reset at zero, so that rounding does not add up over months.
            self._starts[cell] = self._starts[cell] - started if self._open[cell] else 0.0
            self._observed[cell] += share
            if self._observed[cell] > _MOST:
                self._observed[cell] *= _DECAY
                self._reads[cell] *= _DECAY

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._reads, copy._observed = list(self._reads), list(self._observed)
        copy._open, copy._starts = list(self._open), list(self._starts)
        return copy


class WriteBudget:
    """Budget for cache writes, in input tokens at the plain price.

    Even with wrong predictions, prompts cost at most 1.5 % plus eight prompts more than without a cache.
    """

    def __init__(self) -> None:
        self.balance = 0.0

    def allows(self, surcharge: float, prompt_tokens: float) -> bool:
        return surcharge <= self.balance + _PROMPTS * prompt_tokens

    def add(self, plain: float, cost: float) -> None:
        self.balance = min(self.balance + (1 + _SHARE) * plain - cost, _PROMPTS * plain)

    def correct(self, excess: float) -> None:
        self.balance -= excess

    def copy(self) -> Self:
        return shallow_copy(self)


# Samples observed at the same time in a scope; the first half may start at any time.
_SAMPLES = 256


class _Sample(NamedTuple):
    """`cells` are of the documents after the cached ones."""

    started: float
    keys: tuple[Key, ...]
    cached: int
    cells: list[int]


class MarkSamples:
    """Samples of a scope's requests, each observed for one TTL, from which `rates` learns."""

    def __init__(self, rates: MarkRates) -> None:
        self._rates = rates
        self._samples: deque[_Sample] = deque()
        self._sampled = float("-inf")

    def copy(self, rates: MarkRates) -> MarkSamples:
        copy = MarkSamples(rates)
        copy._samples, copy._sampled = self._samples.copy(), self._sampled
        return copy

    def close(self, now: float) -> None:
        while self._samples:
            self._end_first(now)

    def observe(self, asked: Set[Key], now: float) -> None:
        samples, rates = self._samples, self._rates
        while samples and samples[0].started <= now - rates.window_s:
            self._end_first(now)
        for sample in samples:
            for place, key in enumerate(sample.keys):
                if key not in asked:
                    break
                if place >= sample.cached:
                    rates.passed(sample.cells[place - sample.cached])

    def add(self, keys: tuple[Key, ...], cached: int, cells: list[int], now: float) -> None:
        samples, rates = self._samples, self._rates
        sparse = len(samples) < _SAMPLES // 2 or now >= self._sampled + 2 * rates.window_s / _SAMPLES
        if len(samples) < _SAMPLES and sparse:
            samples.append(_Sample(now, keys, cached, cells))
            rates.begin(cells, now)
            self._sampled = now

    def _end_first(self, now: float) -> None:
        sample = self._samples.popleft()
        self._rates.end(sample.cells, sample.started, now)


# Number of documents after the cached prefix among which breakpoints are chosen.
_PLACES = 24
# With this number of breakpoints or fewer, none is used for prefixes that the next breakpoint finds anyway.
_FEW = 2
# Number of nodes that identify the end of a turn in a later one.
_TURN_NODES = 64


class _Path(NamedTuple):
    ends: Sequence[int]
    counts: Sequence[int]
    reads: Mapping[int, float]
    held: int
    live: Sequence[int]


class MarkChoice:
    """Chooses breakpoints for one scope by their expected reads.

    These are the requests within the last TTL with these documents, times the rate at which such counts came true. A
    breakpoint costs the surcharge for writing, and saves the discount of each request that resumes there.
    """

    def __init__(self, rules: CacheRules, rates: MarkRates, budget: WriteBudget) -> None:
        self.rules = rules
        self.budget = budget
        self._rates = rates
        self._cohorts = Cohorts()
        self._times: deque[float] = deque()
        self._samples = MarkSamples(rates)
        self._turns = MarkSamples(rates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.budget, copy._rates, copy._cohorts = self.budget.copy(), self._rates.copy(), self._cohorts.copy()
        copy._times = self._times.copy()
        copy._samples, copy._turns = self._samples.copy(copy._rates), self._turns.copy(copy._rates)
        return copy

    def close(self, now: float) -> None:
        self._samples.close(now)
        self._turns.close(now)

    def choose(
        self, keys: Sequence[Key], ends: Sequence[int], held: int, live: Sequence[int], prompt_tokens: int, now: float
    ) -> tuple[int, ...]:
        """Return a request's breakpoints as numbers of documents before each, ascending.

        `ends[i]`: tokens up to the end of document i; `ends[0]`: before the first. The request can resume after `held`
        documents (-1: nowhere); `live` are other entries on its path.
        """
        counts = self._counts(keys, now)
        expected = self._expected(counts, held, now)
        self._observe(keys, frozenset(keys), counts, held, now)
        path = _Path(ends, counts, dict(enumerate(expected)), held, live)
        return self._select(path, prompt_tokens, self.rules.lookback_parts)

    def choose_turn(
        self,
        keys: Sequence[Key],
        ends: Sequence[int],
        history: int,
        documents: int,
        held: int,
        live: Sequence[int],
        prompt_tokens: int,
        now: float,
    ) -> tuple[int, ...]:
        """Return a turn's breakpoints. `keys`: `history` nodes, documents up to number `documents`, the question."""
        own = keys[:documents] if not history else ()
        counts = self._counts(own, now)
        reads = dict(enumerate(self._expected(counts, held, now))) if not history else {}
        if held >= 0:
            reads.setdefault(held, self._rates.expected(TURN_END, now))
        reads[len(keys)] = self._rates.expected(TURN_END, now)
        asked = frozenset(keys)
        self._turns.observe(asked, now)
        if keys:
            ending = tuple(keys[-_TURN_NODES:])
            self._turns.add(ending, len(ending) - 1, [TURN_END], now)
        if not history:
            self._observe(own, asked, counts, held, now)
        counts += [0] * (len(ends) - len(counts))
        # A history's messages have an unknown number of parts, so the place to resume gets its own breakpoint.
        return self._select(_Path(ends, counts, reads, held, live), prompt_tokens, 1)

    def _select(self, path: _Path, prompt_tokens: int, lookback_parts: int) -> tuple[int, ...]:
        rules, ends, held = self.rules, path.ends, path.held
        extra, saved = rules.write - 1, 1 - rules.read
        gains = {
            place: saved * reads - extra
            for place, reads in path.reads.items()
            if place > held and ends[place] >= rules.minimum_tokens
        }
        base = ends[held] if held >= 0 else 0
        again: tuple[int, ...] = (held,) if held >= 0 else ()
        # If there is room, one breakpoint is for the place where most requests diverge from this one.
        slots = rules.marks - (held > 0 and rules.marks > _FEW)
        new = best_marks(ends, gains, base, slots - len(again))
        if again and len(new) == slots - 1:
            new, again, base = self._crowded(path, gains, new, slots, lookback_parts)
        while new and not self.budget.allows(extra * (ends[new[-1]] - base), prompt_tokens):
            new = new[:-1]
        if held >= 0 and not new:
            again = (held,)
        return self._with_inner(path, [*again, *new])

    def _crowded(
        self, path: _Path, gains: Mapping[int, float], new: tuple[int, ...], slots: int, lookback_parts: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return new breakpoints, `held` if it is set again, and the tokens after which the request writes."""
        ends, held = path.ends, path.held
        near = best_marks(ends, gains, ends[held], slots)
        gained = _gain(ends, gains, ends[held], new)
        found = bool(near) and near[0] - held < lookback_parts
        # With more breakpoints a third new one gains less than expected.
        if found and self.rules.marks <= _FEW and _gain(ends, gains, ends[held], near) > gained:
            return near, (), ends[held]
        if slots == 1:
            # With one breakpoint a deeper one is possible only if this request does not read its cached prefix.
            afresh = best_marks(ends, gains, 0, 1)
            if _gain(ends, gains, 0, afresh) > (1 - self.rules.read) * ends[held] * (1 + path.reads[held]):
                return afresh, (), 0
        return new, (held,), ends[held]

    def _with_inner(self, path: _Path, marks: list[int]) -> tuple[int, ...]:
        """Add free breakpoints inside the cached prefix: where requests diverge, then live entries."""
        rules, ends, counts, held = self.rules, path.ends, path.counts, path.held
        inner = [place for place in range(max(held, 0)) if ends[place] >= rules.minimum_tokens]
        parting = [place for place in inner if counts[place] > counts[place + 1]][:_PLACES]
        apart = {place: float(counts[place] - counts[held]) for place in parting}
        marks += best_marks(ends, apart, 0, rules.marks - len(marks))
        for place in (*inner[:1], *sorted(path.live, reverse=True)):
            if place < held and place not in marks and len(marks) < rules.marks:
                marks.append(place)
        return tuple(sorted(marks))

    def _counts(self, keys: Sequence[Key], now: float) -> list[int]:
        """Return how many requests within the last TTL contain the first 0, 1, 2, … documents."""
        times, oldest = self._times, now - self._rates.window_s
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
        rates, found = self._rates, []
        least = float("inf")
        start = max(held, 0)
        for place, count in enumerate(counts[: start + 1 + _PLACES]):
            if place > start:
                least = min(least, rates.expected(cell_of(count, place - start), now))
            else:
                # Cached prefixes are not written again; the system prompt is in all requests.
                least = max(float(count), rates.expected(cell_of(count, 0), now))
            found.append(least)
        return found

    def _observe(
        self, keys: Sequence[Key], asked: frozenset[Key], counts: Sequence[int], held: int, now: float
    ) -> None:
        self._samples.observe(asked, now)
        cached = max(held, 0)
        if cached < len(keys):
            shown = tuple(keys[: cached + _PLACES])
            cells = [cell_of(counts[place], place - cached) for place in range(cached + 1, len(shown) + 1)]
            self._samples.add(shown, cached, cells, now)
        self._cohorts.add(keys)
        self._times.append(now)
        if len(self._times) > self._cohorts.size:
            self._times.popleft()


def best_marks(ends: Sequence[int], gains: Mapping[int, float], base: int, slots: int) -> tuple[int, ...]:
    """Return at most `slots` of the places in `gains`, ascending, that gain most together.

    A breakpoint gains `gains[place]` for each token after the one before it, or after `base`.
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


def _gain(ends: Sequence[int], gains: Mapping[int, float], base: int, marks: Sequence[int]) -> float:
    found = 0.0
    for mark in marks:
        found += (ends[mark] - base) * gains[mark]
        base = ends[mark]
    return found
