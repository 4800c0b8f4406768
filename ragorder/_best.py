"""Place of a request's most relevant document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ragorder.guards import RequestGuards
from ragorder.settings import Settings
from ragorder.trie.search import Permits, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["BestPlace"]


class BestPlace:
    """Where the model answers best from a document: "first", or "last", which is next to the question.

    The most relevant document stands there, unless that costs more than `best_tokens` cached ones: then "last" is the
    most relevant one that follows the cached prefix. The others stand as ranked. With "any" nothing is given up.
    """

    def __init__(self, settings: Settings) -> None:
        self.end = settings.best
        self.price = settings.best_tokens

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
        if self.end == "any" or self._permits(count, None, ranks_on_path(longest, ranks)):
            return longest
        if guards is not None and not self._permits(count, None, guards.complete((), self.order(count))):
            return longest
        other = find(partial(self._permits, count, permits))
        return other if tree.cached_tokens(longest) - tree.cached_tokens(other) <= self.price else longest

    def _permits(self, count: int, others: Permits | None, ranks: Sequence[int]) -> bool:
        """Whether the best document is, or can still come, at its place in an order that begins with `ranks`."""
        permitted = ranks[:1] in ([], [0]) if self.end == "first" else 0 not in ranks[: count - 1]
        return permitted and (others is None or others(ranks))

    def split(self, prefix: Sequence[int], rest: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Of the ranks in `rest`, after `prefix`: what stands first, what a tail may arrange, what stands last."""
        if self.end == "last":
            return [], rest[1:], rest[:1]
        held = 1 if self.end == "first" and not prefix else 0
        return rest[:held], rest[held:], []

    def order(self, count: int) -> list[int]:
        """That of all documents if none is cached and none moves."""
        first, middle, last = self.split((), [*range(count)])
        return first + middle + last
