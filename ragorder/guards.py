"""Quality guards."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import inf, log2
from operator import eq, ne

# Number of ranks from which the next one is chosen under `max_gain_lost`.
_REACH = 64
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Guards:
    """Limits on how far documents move from retrieval order; by default none.

    `keep_first` or `keep_last` top-ranked documents come first, or last with rank 1 next to the question. Of the
    others, `max_displacement` limits the distance between rank and position, `keep_groups` keeps the order within
    groups, and `max_gain_lost` limits the lost share of discounted cumulative gain (Järvelin, Kekäläinen 2002; gain
    1 / rank).
    """

    keep_first: int = 0
    keep_last: int = 0
    max_displacement: int | None = None
    keep_groups: bool = False
    max_gain_lost: float | None = None

    def __bool__(self) -> bool:
        return self != Guards()

    def for_request(self, count: int, groups: Sequence[Hashable | None]) -> RequestGuards:
        return RequestGuards(self, count, groups)


class RequestGuards:
    """Allowed orders of a request's documents, by rank."""

    def __init__(self, guards: Guards, count: int, groups: Sequence[Hashable | None]) -> None:
        self._first = range(min(guards.keep_first, count))
        self._last = range(min(guards.keep_last, count) - 1, len(self._first) - 1, -1)
        self._middle = range(len(self._first) + len(self._last), count)
        limit = guards.max_displacement
        self._limit = count if limit is None else limit
        self._may_lose = inf
        if guards.max_gain_lost is not None:
            self._may_lose = _ROUNDING + guards.max_gain_lost * sum(
                _gain(rank) * self._discount(rank) for rank in self._middle
            )
        self._previous_in_group = self._chain(groups) if guards.keep_groups else {}
        # The permitted beginning of the last path asked for: after each rank the best one left, and the gain lost.
        self._placed: dict[int, tuple[int, float]] = {}

    def _chain(self, groups: Sequence[Hashable | None]) -> dict[int, int]:
        previous: dict[int, int] = {}
        newest: dict[Hashable, int] = {}
        for rank in self._middle:
            group = groups[rank]
            if group is not None:
                if group in newest:
                    previous[rank] = newest[group]
                newest[group] = rank
        return previous

    def permits(self, ranks: Sequence[int]) -> bool:
        first, middle = len(self._first), len(self._middle)
        if any(map(ne, ranks, self._first)) or any(map(ne, self._last, ranks[first + middle :])):
            return False
        begun, placed = ranks[first : first + middle], self._placed
        # A search asks for one path after the other, and most of them begin as the last one did.
        kept = sum(takewhile(bool, map(eq, begun, placed)))
        while len(placed) > kept:
            placed.popitem()
        return all(map(self._place, begun[kept:]))

    def _place(self, rank: int) -> bool:
        """Place a rank after those placed, if it may stand there."""
        placed = self._placed
        place = self._middle.start + len(placed)
        earliest, lost = next(reversed(placed.values()), (self._middle.start, 0.0))
        if rank not in self._middle or not self._may_stand(rank, place, earliest, placed):
            return False
        # The best of those left loses nothing.
        if self._may_lose < inf and rank != earliest:
            loss = self._gains_lost(place, earliest, placed, self._may_lose - lost).get(rank)
            if loss is None:
                return False
            lost += loss
        placed[rank] = earliest, lost
        while earliest in placed:
            earliest += 1
        placed[rank] = earliest, lost
        return True

    def _may_stand(self, rank: int, place: int, earliest: int, placed: Container[int]) -> bool:
        """`earliest`, the best rank not yet placed, must come at its latest allowed place."""
        if rank == earliest:
            return True
        in_reach = rank - place <= self._limit and place + 1 - earliest <= self._limit
        return in_reach and self._follows_its_group(rank, placed)

    def _follows_its_group(self, rank: int, placed: Container[int]) -> bool:
        previous = self._previous_in_group.get(rank)
        return previous is None or previous in placed

    def _discount(self, place: int) -> float:
        return 1 / log2(place - len(self._last) + 2)

    def _gains_lost(self, place: int, earliest: int, placed: Container[int], most: float) -> dict[int, float]:
        losses: dict[int, float] = {}
        now, moved, next_place = self._discount(place), 0.0, place
        for rank in range(earliest, min(earliest + _REACH, self._middle.stop)):
            if rank in placed:
                continue
            gain, discount = _gain(rank), self._discount(next_place)
            if moved - gain * now > most:
                break
            lost = moved - gain * (now - discount)
            if lost <= most:
                losses[rank] = lost
            next_place += 1
            moved += gain * (discount - self._discount(next_place))
        return losses

    def complete(self, prefix: Sequence[int], preferred: Sequence[int]) -> list[int]:
        first = [*prefix[: len(self._first)], *self._first[len(prefix) :]]
        begun = list(prefix[len(first) :])
        middle = begun[: len(self._middle)] + self._arrange(begun[: len(self._middle)], preferred)
        return [*first, *middle, *self._last]

    def _arrange(self, begun: Sequence[int], preferred: Sequence[int]) -> list[int]:
        preference = {rank: number for number, rank in enumerate(preferred)}
        placed = set(begun)
        waiting_for: dict[int, int] = {previous: rank for rank, previous in self._previous_in_group.items()}
        ready: list[tuple[int, int]] = []
        earliest = released = self._middle.start
        arranged: list[int] = []
        may_lose = self._may_lose - self._lost(begun)

        def offer(rank: int) -> None:
            if rank not in placed and self._follows_its_group(rank, placed):
                heappush(ready, (preference[rank], rank))

        for place in range(self._middle.start + len(begun), self._middle.stop):
            while released in self._middle and released - place <= self._limit:
                offer(released)
                released += 1
            while earliest in placed:
                earliest += 1
            rank = earliest
            if place + 1 - earliest <= self._limit:
                if self._may_lose < inf:
                    losses = self._gains_lost(place, earliest, placed, may_lose)
                    allowed = [each for each in losses if each < released and self._follows_its_group(each, placed)]
                    rank = min(allowed, key=preference.__getitem__)
                    may_lose -= losses[rank]
                else:
                    while ready and ready[0][1] in placed:
                        heappop(ready)
                    if ready:
                        rank = heappop(ready)[1]
            placed.add(rank)
            arranged.append(rank)
            follower = waiting_for.get(rank)
            if follower is not None and follower < released:
                offer(follower)
        return arranged

    def _lost(self, begun: Sequence[int]) -> float:
        if self._may_lose == inf:
            return 0.0
        placed: set[int] = set()
        lost, earliest = 0.0, self._middle.start
        for place, rank in enumerate(begun, self._middle.start):
            lost += self._gains_lost(place, earliest, placed, inf).get(rank, 0.0)
            placed.add(rank)
            while earliest in placed:
                earliest += 1
        return lost


def _gain(rank: int) -> float:
    return 1 / (rank + 1)
