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
    """Position at which the model reads the most relevant document best: "first", or "last" (next to the question).

    A request loses at most `best_tokens` cached tokens for it; otherwise "last" is the most relevant document after the
    cached prefix. Other documents keep retrieval order. "any" prefers no position.
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
        """Return the last node of the best cached path. `find` returns the longest permitted path."""
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
        permitted = ranks[:1] in ([], [0]) if self.end == "first" else 0 not in ranks[: count - 1]
        return permitted and (others is None or others(ranks))

    def split(self, prefix: Sequence[int], rest: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Split the ranks in `rest`, which follow `prefix`: first ones, those for a tail to arrange, last ones."""
        if self.end == "last":
            return [], rest[1:], rest[:1]
        held = 1 if self.end == "first" and not prefix else 0
        return rest[:held], rest[held:], []

    def order(self, count: int) -> list[int]:
        """Return the order if no document is cached and none moves."""
        first, middle, last = self.split((), [*range(count)])
        return first + middle + last
