"""Forecast of future requests that contain given documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy as shallow_copy
from math import sqrt
from typing import NamedTuple, Self

from ragorder.trie.cohorts import Cohorts
from ragorder.trie.tree import Key

HORIZON = 300
"""Future requests forecast: about the time that a path stays cached."""

# The latest requests do not vote: documents that they share with this one belong to a burst, or are cached already.
_RECENT = 32
# About a third of a burst's requests is counted in the last `_RECENT`: bursts are longer than that.
_BURST_LENGTH = 3.0
_RANKS = 64


class ExpectedUses:
    """Expected number of the next `HORIZON` requests that contain all of some documents.

    That is the recorded requests with these documents, times the rate at which such counts came true, plus the rest of
    the present burst.
    """

    def __init__(self, requests: int = 2048) -> None:
        self.cohorts = Cohorts(requests)
        self.voters = 0
        """Mask of voting requests."""
        # Masks of the latest requests, after each recent request and now.
        self._latest: deque[int] = deque([0], maxlen=3 * _RECENT + 1)
        self.per_vote = 0.0
        """Expected uses per vote."""
        self.burst = 0.0
        """Expected requests of the present burst."""
        self._recurrence = _Recurrence()
        self._bursts = _Bursts()
        self._pending: Sequence[Key] = ()

    @property
    def kept(self) -> Sequence[float]:
        return self._bursts.kept

    def observe(self, keys: Sequence[Key]) -> None:
        """Record a request in rank order; it counts from the next request on."""
        self.learn()
        self._pending = keys

    def learn(self) -> None:
        keys, self._pending = self._pending, ()
        if not keys:
            return
        cohorts = self.cohorts
        before = len(cohorts)
        masks = cohorts.add(keys)
        earlier = self._latest[0] if before >= 4 * _RECENT else None
        self._bursts.learn(keys, masks, self._latest[-1], earlier, cohorts)
        self._latest.append(cohorts.latest(_RECENT))
        self.voters = cohorts.all ^ self._latest[-1]
        self._recurrence.learn(keys, cohorts, self.voters)
        self.per_vote = self._recurrence.slope
        self.burst = _BURST_LENGTH * self._bursts.related / cohorts.added

    def joined(self, keys: Sequence[Key], placed: Sequence[int], candidates: Sequence[int]) -> list[float]:
        masks, kept, votes, burst = self.cohorts.masks, self.kept, self.voters, self.burst
        for rank in placed:
            votes &= masks.get(keys[rank], 0)
            burst *= kept[min(rank, _RANKS - 1)]
        return [
            self.per_vote * (votes & masks.get(keys[rank], 0)).bit_count() + burst * kept[min(rank, _RANKS - 1)]
            for rank in candidates
        ]

    def in_the_long_run(self, keys: Sequence[Key]) -> list[float]:
        """Return uncalibrated uses of the first document, the first two, …, by all requests, the last one included."""
        cohorts, kept = self.cohorts, self.kept
        masks, votes, burst = cohorts.masks, cohorts.latest(len(cohorts)), _BURST_LENGTH * self._bursts.excess
        expected = []
        for rank, key in enumerate(keys):
            votes &= masks.get(key, 0)
            burst *= kept[min(rank, _RANKS - 1)]
            expected.append(1 + votes.bit_count() + burst)
        return expected

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.cohorts = self.cohorts.copy()
        copy._latest = self._latest.copy()
        copy._recurrence = self._recurrence.copy()
        copy._bursts = self._bursts.copy()
        return copy


class _Sample(NamedTuple):
    added: int
    keys: Sequence[Key]
    votes: list[int]


class _Recurrence:
    """Rate at which requests recur: the slope of later over earlier counts within one request's documents."""

    # Requests after which a sample is compared, requests between two samples, and weights of the regression.
    _AHEAD = 64
    _EVERY = 4
    _DECAY = 0.996
    _PRIOR = 5.0

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._products = self._squares = 0.0
        self.slope = 0.0

    def learn(self, keys: Sequence[Key], cohorts: Cohorts, voters: int) -> None:
        if cohorts.added % self._EVERY:
            return
        masks = cohorts.masks
        votes = [(masks.get(key, 0) & voters).bit_count() for key in keys[:_RANKS]]
        self._samples.append(_Sample(cohorts.added, keys[:_RANKS], votes))
        if self._samples and cohorts.added - self._samples[0].added >= self._AHEAD:
            self._compare(self._samples.popleft(), cohorts)
        # The prior: documents recur as often as before.
        expected = self._AHEAD / max(self._AHEAD, len(cohorts))
        slope = (self._products + self._PRIOR * expected) / (self._squares + self._PRIOR)
        self.slope = max(0.0, slope) * HORIZON / self._AHEAD

    def _compare(self, sample: _Sample, cohorts: Cohorts) -> None:
        since = cohorts.latest(self._AHEAD)
        later = [(cohorts.masks.get(key, 0) & since).bit_count() for key in sample.keys]
        mean_votes, mean_later = sum(sample.votes) / len(later), sum(later) / len(later)
        products = squares = 0.0
        for votes, count in zip(sample.votes, later, strict=True):
            products += (votes - mean_votes) * (count - mean_later)
            squares += (votes - mean_votes) ** 2
        self._products = self._DECAY * self._products + products
        self._squares = self._DECAY * self._squares + squares

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._samples = self._samples.copy()
        return copy


class _Bursts:
    """Bursts of requests that share documents, and the share of documents kept by rank."""

    def __init__(self) -> None:
        self.related = 0
        self._excess = self._compared = 0
        self._kept = [0] * _RANKS
        self._seen = [0] * _RANKS
        self._learnt = self._next_estimate = 0
        self._shares: list[float] | None = None

    @property
    def excess(self) -> float:
        return max(0, self._excess) / max(1, self._compared)

    @property
    def kept(self) -> list[float]:
        if self._shares is None:
            self._shares = self._estimate()
        return self._shares

    def learn(
        self, keys: Sequence[Key], masks: Sequence[int], recent: int, earlier: int | None, cohorts: Cohorts
    ) -> None:
        among = recent | (earlier or 0)
        # The requests that share one document with it, and those that share two or more.
        sharing = twice = 0
        for mask in masks:
            mask &= among
            if mask:
                twice |= sharing & mask
                sharing |= mask
        count = (twice & recent).bit_count()
        if earlier is not None:
            self._excess += count - (twice & earlier).bit_count()
            self._compared += 1
        if count:
            self.related += count
            now = set(keys)
            for rank, key in enumerate(cohorts.newest(twice & recent)[:_RANKS]):
                self._seen[rank] += 1
                self._kept[rank] += key in now
            self._learnt += 1
            if self._learnt >= self._next_estimate:
                # Further bursts change little: estimate again after 2 % more.
                self._next_estimate = self._learnt + 1 + self._learnt // 50
                self._shares = None

    def _estimate(self) -> list[float]:
        mean = (sum(self._kept) + 1) / (sum(self._seen) + 2)
        shares = []
        for kept, seen in zip(self._kept, self._seen, strict=True):
            share = mean
            if seen >= 5:
                error, difference = 2 * sqrt(mean * (1 - mean) / seen), kept / seen - mean
                share += max(0.0, difference - error) + min(0.0, difference + error)
            shares.append(share)
        return shares

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._kept, copy._seen = list(self._kept), list(self._seen)
        return copy
