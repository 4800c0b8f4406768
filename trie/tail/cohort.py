"""Tail that learns which documents are requested together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from math import inf
from typing import Any, Self

from ragorder.trie.expected_uses import ExpectedUses
from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tree import Key, Node, RequestedDocuments

__all__ = ["MIN_GAIN", "CohortTail"]

MIN_GAIN = 10.0

# Documents among which the next one is chosen: those behind them keep their order.
_CHOICES = 64


@tails.register("cohort", "documents first that later requests are expected to share")
class CohortTail(Tail):
    """Next comes the document that saves most tokens, if the requests to come contain it and all documents before it.

    A document moves ahead only where that is expected to save `min_gain` tokens for each place, in the next
    `expected_uses.HORIZON` requests: 0 moves for any gain, infinity keeps rank order.
    """

    def __init__(self, min_gain: float = MIN_GAIN) -> None:
        self.min_gain = min_gain
        self.uses = ExpectedUses()

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings.min_gain)

    def observe(self, request: RequestedDocuments) -> None:
        self.uses.observe(request.keys)

    def observing(self, request: RequestedDocuments) -> AbstractContextManager[None]:
        # A request counts only from the next one on.
        self.uses.learn()
        return nullcontext()

    def served(self, path: Sequence[Node]) -> None:
        # Off the path of the next request.
        self.uses.learn()

    def expected_uses(self, keys: Sequence[Key]) -> Sequence[float]:
        return self.uses.in_the_long_run(keys)

    def coming_uses(
        self, request: RequestedDocuments, placed: Sequence[int], candidates: Sequence[int]
    ) -> Sequence[float]:
        return self.uses.joined(request.keys, placed, candidates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.uses = self.uses.copy()
        return copy

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        if len(rest) < 2:
            return rest
        tokens, uses = request.tokens, self.uses
        per_vote, min_gain, mask_of = uses.per_vote, self.min_gain, uses.cohorts.masks.get
        masks = [mask_of(key, 0) for key in request.keys]
        kept = uses.kept
        if len(masks) > len(kept):
            kept = [*kept, *[kept[-1]] * (len(masks) - len(kept))]
        votes, burst = uses.voters, uses.burst
        for rank in prefix:
            votes &= masks[rank]
            burst *= kept[rank]
        left, arranged = rest[:_CHOICES], []
        longest = max(tokens)
        # They only decrease, so former numbers of votes are bounds.
        count = votes.bit_count() if prefix else len(uses.cohorts)
        counts = [count] * len(masks)
        # Until no document can save enough for a single place.
        while len(left) > 1 and (per_vote * count + burst) * longest > min_gain:
            best, price = -inf, 0.0
            for rank in left:
                length, in_burst = tokens[rank], burst * kept[rank]
                if (per_vote * counts[rank] + in_burst) * length - price > best:
                    shared = votes & masks[rank]
                    counts[rank] = shared.bit_count()
                    gain = (per_vote * counts[rank] + in_burst) * length - price
                    if gain > best:
                        best, chosen, sharing = gain, rank, shared
                price += min_gain
            left.remove(chosen)
            arranged.append(chosen)
            votes, count = sharing, counts[chosen]
            burst *= kept[chosen]
        return [*arranged, *left, *rest[_CHOICES:]]
