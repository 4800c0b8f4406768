"""Quality guards: limits on the distance between a document's rank and its place."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

__all__ = ["Guards", "RequestGuards"]


@dataclass(frozen=True, slots=True)
class Guards:
    """Limits on the order of the documents; the default limits nothing.

    `keep_first` or `keep_last` top-ranked documents stand first in rank order, or last with rank 1 next to the
    question. For the others `max_displacement` limits the distance between rank and place, and with `keep_groups` a
    group keeps its relative order.
    """

    keep_first: int = 0
    keep_last: int = 0
    max_displacement: int | None = None
    keep_groups: bool = False

    def __bool__(self) -> bool:
        return bool(self.keep_first or self.keep_last or self.keep_groups or self.max_displacement is not None)

    def for_request(self, count: int, groups: Sequence[Hashable | None]) -> RequestGuards:
        return RequestGuards(self, count, groups)


class RequestGuards:
    """The allowed orders of a request's documents, by rank."""

    def __init__(self, guards: Guards, count: int, groups: Sequence[Hashable | None]) -> None:
        self._first = range(min(guards.keep_first, count))
        self._last = range(min(guards.keep_last, count) - 1, len(self._first) - 1, -1)
        self._middle = range(len(self._first) + len(self._last), count)
        limit = guards.max_displacement
        self._limit = count if limit is None else limit
        self._previous_in_group = self._chain(groups) if guards.keep_groups else {}

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
        if any(rank != place for place, rank in enumerate(ranks[:first])):
            return False
        if any(rank != place for place, rank in zip(self._last, ranks[first + middle :], strict=False)):
            return False
        placed: set[int] = set()
        earliest = self._middle.start
        for place, rank in enumerate(ranks[first : first + middle], self._middle.start):
            if rank not in self._middle or not self._may_stand(rank, place, earliest, placed):
                return False
            placed.add(rank)
            while earliest in placed:
                earliest += 1
        return True

    def _may_stand(self, rank: int, place: int, earliest: int, placed: set[int]) -> bool:
        """`earliest`, the best rank not yet placed, must come now at its latest allowed place."""
        if rank == earliest:
            return True
        previous = self._previous_in_group.get(rank)
        in_group_order = previous is None or previous in placed
        return in_group_order and rank - place <= self._limit and place + 1 - earliest <= self._limit

    def complete(self, prefix: Sequence[int], preferred: Sequence[int]) -> list[int]:
        """The allowed order that begins with `prefix` and is closest to the preferred one."""
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

        def offer(rank: int) -> None:
            previous = self._previous_in_group.get(rank)
            if rank not in placed and (previous is None or previous in placed):
                heappush(ready, (preference[rank], rank))

        for place in range(self._middle.start + len(begun), self._middle.stop):
            while released in self._middle and released - place <= self._limit:
                offer(released)
                released += 1
            while earliest in placed:
                earliest += 1
            rank = earliest
            if place + 1 - earliest <= self._limit:
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
