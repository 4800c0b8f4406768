"""Place of a request's most relevant document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ragorder.guards import RequestGuards
from ragorder.settings import Settings
from ragorder.trie.plan import CachedPath, Planned, shared_tokens
from ragorder.trie.search import ranks_on_path
from ragorder.trie.search.base import Permits
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["BestPlace"]


class BestPlace:
    """Where the model answers best from a document: "first", or "last", which is next to the question.

    The most relevant document stands there, unless that costs more than `best_tokens` cached ones: then "last" is the
    most relevant one that follows the cached prefix. The others stand as ranked. With "any" nothing is given up.
    """

    def __init__(self, settings: Settings) -> None:
        self._end = settings.best
        self._price = settings.best_tokens

    def choose(
        self,
        find: Callable[[Permits | None], Node],
        tree: KnowledgeTree,
        ranks: Mapping[Key, int],
        guards: RequestGuards | None,
    ) -> Node:
        """The last node of the cached path that is worth most. `find` finds the longest one that is permitted."""
        permits = None if guards is None else guards.permits
        longest = find(permits)
        count = len(ranks)
        if self._end == "any" or self._permits(count, None, ranks_on_path(longest, ranks)):
            return longest
        if guards is not None and not self._permits(count, None, guards.complete((), self.order(count))):
            return longest
        other = find(partial(self._permits, count, permits))
        return other if tree.cached_tokens(longest) - tree.cached_tokens(other) <= self._price else longest

    def _permits(self, count: int, others: Permits | None, ranks: Sequence[int]) -> bool:
        """Whether the best document is, or can still come, at its place in an order that begins with `ranks`."""
        permitted = ranks[:1] in ([], [0]) if self._end == "first" else 0 not in ranks[: count - 1]
        return permitted and (others is None or others(ranks))

    def split(self, prefix: Sequence[int], rest: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Of the ranks in `rest`, after `prefix`: what stands first, what a tail may arrange, what stands last."""
        if self._end == "last":
            return [], rest[1:], rest[:1]
        held = 1 if self._end == "first" and not prefix else 0
        return rest[:held], rest[held:], []

    def order(self, count: int) -> list[int]:
        """That of all documents if none is cached and none moves."""
        first, middle, last = self.split((), [*range(count)])
        return first + middle + last

    def improve(
        self,
        planned: Sequence[Planned],
        requests: Sequence[Sequence[Key]],
        cached: Sequence[CachedPath],
        tokens: Mapping[Key, int],
    ) -> Sequence[Planned]:
        """The plan of a batch, whose requests are given as ranked, with the best documents at their place."""
        if self._end == "any":
            return planned
        improved: list[Planned] = []
        for place, (number, order) in enumerate(planned):
            best = requests[number][:1]
            others = [key for key in order if key not in best]
            moved = [*best, *others] if self._end == "first" else [*others, *best]
            before = [cached[number].keys, *(other for _, other in improved[-1:])]
            after = [other for _, other in planned[place + 1 : place + 2]]
            lost = _saved(order, before, after, tokens) - _saved(moved, before, after, tokens)
            improved.append((number, moved if lost <= self._price else order))
        return improved


def _saved(
    order: Sequence[Key], before: Sequence[Sequence[Key]], after: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> int:
    """Tokens that it finds of one of those before, and the next one finds of it."""
    found = max(shared_tokens(order, other, tokens) for other in before)
    return found + sum(shared_tokens(order, other, tokens) for other in after)
