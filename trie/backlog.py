"""Plans a batch from what the engine already holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    Requests that gain more from their cached path than from their place in a plan from scratch are served first,
    before what they need is evicted: least recently used paths first, those on one path together.
    """
    planned = plan(requests, tokens)
    if not any(path.tokens for path in cached):
        return planned
    on_path: dict[CachedPath, list[int]] = {}
    rest: list[Planned] = []
    for place, (index, order) in enumerate(planned):
        before = rest[-1][1] if rest else []
        after = planned[place + 1][1] if place + 1 < len(planned) else []
        cost = _shared(before, order, tokens) + _shared(order, after, tokens) - _shared(before, after, tokens)
        if cached[index].tokens > cost:
            on_path.setdefault(cached[index], []).append(index)
        else:
            rest.append((index, order))
    return _extend(on_path, requests, tokens) + rest


def _extend(
    on_path: Mapping[CachedPath, Sequence[int]], requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> list[Planned]:
    extended = []
    for path in sorted(on_path, key=lambda path: path.stamp):
        held = list(path.keys)
        placed = set(held)
        indices = on_path[path]
        beyond = plan([[key for key in requests[index] if key not in placed] for index in indices], tokens)
        extended += [(indices[number], held + order) for number, order in beyond]
    return extended


def _shared(one: Sequence[Key], other: Sequence[Key], tokens: Mapping[Key, int]) -> int:
    shared = 0
    for key, opposite in zip(one, other, strict=False):
        if key != opposite:
            break
        shared += tokens[key]
    return shared
