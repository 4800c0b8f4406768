"""Plans a batch from what the engine already holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ragorder.trie.plan import plan
from ragorder.trie.tree import Key

__all__ = ["CachedPath", "plan_backlog"]

Planned = tuple[int, list[Key]]


class CachedPath(NamedTuple):
    """The best cached path of one request: its documents, how many tokens of them are held, when it was last used."""

    keys: tuple[Key, ...]
    tokens: int
    stamp: int


def plan_backlog(
    requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int], cached: Sequence[CachedPath]
) -> list[Planned]:
    """(request, its documents in order) in serving order, for a cache that holds a path for each request.

    Requests that gain more from their cached path than from their places in a plan from scratch are served first,
    before what they need is evicted: least recently used paths first, those on one path together.
    """
    planned = plan(requests, tokens)
    places: dict[CachedPath, list[int]] = {}
    for place, (index, _) in enumerate(planned):
        if cached[index].tokens:
            places.setdefault(cached[index], []).append(place)
    scratch = _Scratch([order for _, order in planned], tokens)
    on_path: list[Planned] = []
    moved: set[int] = set()
    for path in sorted(places, key=lambda path: path.stamp):
        # What the requests of one path share in the plan, they share on the path as well: they move together, or alone.
        for group in (places[path], [place for place in places[path] if path.tokens > scratch.cost([place])]):
            extended = _extend(path, [planned[place][0] for place in group], requests, tokens)
            if path.tokens + _saved(extended, tokens) > scratch.cost(group):
                on_path += extended
                moved.update(group)
                break
    return on_path + [each for place, each in enumerate(planned) if place not in moved]


class _Scratch:
    """The documents of a plan from scratch, in serving order."""

    def __init__(self, orders: Sequence[Sequence[Key]], tokens: Mapping[Key, int]) -> None:
        self._orders = [[], *orders, []]
        self._tokens = tokens

    def cost(self, places: Sequence[int]) -> int:
        """The tokens that the plan no longer shares if the requests at these places, in rising order, are taken out."""
        cost = 0
        for first, last in _runs(places):
            cost += sum(self._shared(place, place + 1) for place in range(first - 1, last + 1))
            cost -= self._shared(first - 1, last + 1)
        return cost

    def _shared(self, place: int, other: int) -> int:
        return _shared(self._orders[place + 1], self._orders[other + 1], self._tokens)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive places."""
    first = last = None
    for place in places:
        if first is None or last is None:
            first = place
        elif place != last + 1:
            yield first, last
            first = place
        last = place
    if first is not None and last is not None:
        yield first, last


def _extend(
    path: CachedPath, indices: Sequence[int], requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> list[Planned]:
    """The requests on their cached path, planned from its end."""
    held = list(path.keys)
    placed = set(held)
    beyond = plan([[key for key in requests[index] if key not in placed] for index in indices], tokens)
    return [(indices[number], held + order) for number, order in beyond]


def _saved(planned: Sequence[Planned], tokens: Mapping[Key, int]) -> int:
    return sum(_shared(order, after, tokens) for (_, order), (_, after) in pairwise(planned))


def _shared(one: Sequence[Key], other: Sequence[Key], tokens: Mapping[Key, int]) -> int:
    shared = 0
    for key, opposite in zip(one, other, strict=False):
        if key != opposite:
            break
        shared += tokens[key]
    return shared
