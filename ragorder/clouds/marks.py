"""Choice of the marks that a request sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder.clouds.rules import CacheRules
from ragorder.trie.cohorts import Cohorts
from ragorder.trie.tree import Key

__all__ = ["CELLS", "TURN_END", "MarkChoice", "MarkRates", "MarkSamples", "WriteBudget", "best_marks", "cell_of"]

_COUNTS = 5
_RATED_PLACES = 11
CELLS = _COUNTS * _RATED_PLACES
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
    return min(count.bit_length(), _COUNTS - 1) * _RATED_PLACES + min(places, _RATED_PLACES - 1)


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
        count, place = divmod(cell, _RATED_PLACES)
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


# Documents behind what is cached among which marks are chosen.
_PLACES = 24
# Marks of which none can be spared for what is found from the next one anyway.
_FEW = 2
# Nodes by which the end of a turn is recognised in a later one.
_TURN_NODES = 64


class _Path(NamedTuple):
    """What is known of a request's places: tokens up to each, how many requests contained it, and how many are expected
    to read it; the place where it resumes (-1: none), and other entries."""

    ends: Sequence[int]
    counts: Sequence[int]
    reads: Mapping[int, float]
    held: int
    live: Sequence[int]


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
        self._samples = MarkSamples(rates)
        self._turns = MarkSamples(rates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.budget, copy._rates, copy._cohorts = self.budget.copy(), self._rates.copy(), self._cohorts.copy()
        copy._times = self._times.copy()
        copy._samples, copy._turns = self._samples.copy(copy._rates), self._turns.copy(copy._rates)
        return copy

    def close(self, now: float) -> None:
        """Its scope is forgotten."""
        self._samples.close(now)
        self._turns.close(now)

    def choose(
        self, keys: Sequence[Key], ends: Sequence[int], held: int, live: Sequence[int], prompt_tokens: int, now: float
    ) -> tuple[int, ...]:
        """The marks of a request, as numbers of documents in front of each, ascending; it counts from the next one on.

        `ends[i]`: tokens up to the end of document i, and `ends[0]` those in front of the first. The request can resume
        behind `held` documents (-1: nowhere), and does so if one of its marks stands there, or less than the rules'
        `lookback_parts` behind that; `live` are other entries on its path.
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
        """The same for a turn of a conversation: `keys` are `history` nodes, documents up to number `documents`, and
        the question, at whose end the next turn resumes. What stands behind a history is shared by nothing else."""
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
        # How many parts a message of the history has is not known: what is resumed gets a mark of its own.
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
        # One is for where most requests part from this one, if there is room.
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
        """Where a mark for what is resumed leaves too little room: the new marks, that one, if it is set again, and the
        tokens behind which is written."""
        ends, held = path.ends, path.held
        near = best_marks(ends, gains, ends[held], slots)
        gained = _gain(ends, gains, ends[held], new)
        found = bool(near) and near[0] - held < lookback_parts
        # Where there is room a third new mark gains less than was expected.
        if found and self.rules.marks <= _FEW and _gain(ends, gains, ends[held], near) > gained:
            return near, (), ends[held]
        if slots == 1:
            # A cache with one mark gets a deeper one only if this request forgoes what it could read.
            afresh = best_marks(ends, gains, 0, 1)
            if _gain(ends, gains, 0, afresh) > (1 - self.rules.read) * ends[held] * (1 + path.reads[held]):
                return afresh, (), 0
        return new, (held,), ends[held]

    def _with_inner(self, path: _Path, marks: list[int]) -> tuple[int, ...]:
        """With marks within what is cached, which cost nothing: where most requests part from this one, then those that
        live."""
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

    def _observe(
        self, keys: Sequence[Key], asked: frozenset[Key], counts: Sequence[int], held: int, now: float
    ) -> None:
        """A request whose documents `keys`, of all that it has `asked` for, others may share."""
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


def _gain(ends: Sequence[int], gains: Mapping[int, float], base: int, marks: Sequence[int]) -> float:
    """As `best_marks` counts it."""
    found = 0.0
    for mark in marks:
        found += (ends[mark] - base) * gains[mark]
        base = ends[mark]
    return found
