"""Tail policies: the order of documents after the cached prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from math import inf
from typing import Any, Literal, Self

from ragorder.trie.expected_uses import ExpectedUses
from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key, Node, RequestedDocuments

Ranks = Sequence[int]

Waiting = Sequence[frozenset[Key]]
"""Document keys of each waiting request, next request first."""


class Tail(ABC):
    """Orders documents, given by rank, after the cached prefix for future requests.

        @tails.register("reversed", "the least relevant document first")
        class ReversedTail(Tail):
            def arrange(self, request, prefix, rest, waiting):
                return rest[::-1]

    The defaults suit a policy without memory.
    """

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls()

    def observe(self, request: RequestedDocuments) -> None:  # noqa: B027
        """Record a request that will be arranged next."""

    def observing(self, request: RequestedDocuments) -> AbstractContextManager[None]:
        """Return a context in which the request counts as observed."""
        return nullcontext()

    def served(self, path: Sequence[Node]) -> None:  # noqa: B027
        """Record a path, from the root, that the engine has computed."""

    def expected_uses(self, keys: Sequence[Key]) -> Sequence[float]:
        """Return the expected requests with the first document, the first two, …, or nothing."""
        return ()

    def coming_uses(self, request: RequestedDocuments, placed: Ranks, candidates: Ranks) -> Sequence[float]:
        """Return for each of `candidates` the expected requests with it and `placed`, or nothing."""
        return ()

    def copy(self) -> Self:
        """Return an independent policy with the same memory."""
        return self

    @abstractmethod
    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
        """Return the ranks in `rest`, given in rank order, in the order after `prefix`."""


tails: Registry[Tail] = Registry("tail")


@tails.register("prefix", "only the cached prefix moves; other documents keep retrieval order (RAGCache++)")
class RankTail(Tail):
    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
        return rest


@tails.register("queue", "documents of waiting requests first, else retrieval order")
class QueueTail(Tail):
    """Places next the document of most waiting requests that can share the prefix; `fallback` arranges the rest."""

    def __init__(self, fallback: Tail | None = None) -> None:
        self.fallback = RankTail() if fallback is None else fallback

    def observe(self, request: RequestedDocuments) -> None:
        self.fallback.observe(request)

    def observing(self, request: RequestedDocuments) -> AbstractContextManager[None]:
        return self.fallback.observing(request)

    def served(self, path: Sequence[Node]) -> None:
        self.fallback.served(path)

    def expected_uses(self, keys: Sequence[Key]) -> Sequence[float]:
        return self.fallback.expected_uses(keys)

    def coming_uses(self, request: RequestedDocuments, placed: Ranks, candidates: Ranks) -> Sequence[float]:
        return self.fallback.coming_uses(request, placed, candidates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.fallback = self.fallback.copy()
        return copy

    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
        keys = request.keys
        rest = self.fallback.arrange(request, prefix, rest, waiting)
        placed = [keys[rank] for rank in prefix]
        sharing = [wanted for wanted in waiting if wanted.issuperset(placed)]
        arranged: list[int] = []
        while sharing and rest:
            wanted_by = [sum([keys[rank] in wanted for wanted in sharing]) for rank in rest]
            most = max(wanted_by)
            if not most:
                break
            if most == len(sharing):
                arranged += [rank for rank, count in zip(rest, wanted_by, strict=True) if count == most]
                rest = [rank for rank, count in zip(rest, wanted_by, strict=True) if count < most]
            else:
                key = keys[rest[wanted_by.index(most)]]
                sharing = [wanted for wanted in sharing if key in wanted]
        return arranged + rest


MIN_GAIN = 10.0

# Number of documents from which the next one is chosen; later documents keep their order.
_CHOICES = 64


@tails.register("cohort", "documents first that later requests are expected to share")
class CohortTail(Tail):
    """Places next the document that saves most tokens if future requests contain it and all documents before it.

    It moves only if that should save `min_gain` tokens for each place: 0 for any gain, infinity for rank order.
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
        # A request counts from the next one on.
        self.uses.learn()
        return nullcontext()

    def served(self, path: Sequence[Node]) -> None:
        # Learning here keeps it off the latency of the next request.
        self.uses.learn()

    def expected_uses(self, keys: Sequence[Key]) -> Sequence[float]:
        return self.uses.in_the_long_run(keys)

    def coming_uses(self, request: RequestedDocuments, placed: Ranks, candidates: Ranks) -> Sequence[float]:
        return self.uses.joined(request.keys, placed, candidates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.uses = self.uses.copy()
        return copy

    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
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
        # Votes only decrease, so earlier counts are upper bounds.
        count = votes.bit_count() if prefix else len(uses.cohorts)
        counts = [count] * len(masks)
        # Stop when no document can save enough for a single place.
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


@tails.register("free", "queue for waiting requests, cohort without any")
class FreeTail(QueueTail):
    fallback: CohortTail

    def __init__(self, min_gain: float = MIN_GAIN) -> None:
        super().__init__(CohortTail(min_gain))

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings.min_gain)

    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
        if not waiting:
            return self.fallback.arrange(request, prefix, rest, waiting)
        return super().arrange(request, prefix, rest, waiting)


@tails.register("earned", "as free, but cohort only while it saves tokens, else prefix")
class EarnedTail(FreeTail):
    """`FreeTail` with a `fallback` that keeps rank order unless it pays."""

    fallback: GatedTail

    def __init__(self, min_gain: float = MIN_GAIN) -> None:
        super().__init__(min_gain)
        self.fallback = GatedTail(min_gain)


class GatedTail(CohortTail):
    """Moves documents only while it `pays`, as `ragorder.scope.moves.EarnedMoves` measures."""

    pays = False
    # The last forecast, since it is usually needed twice: for serving and for measuring.
    _known: tuple[RequestedDocuments | None, Ranks, list[int], list[int]] = None, (), [], []

    def arrange(self, request: RequestedDocuments, prefix: Ranks, rest: list[int], waiting: Waiting) -> list[int]:
        if not self.pays:
            return rest
        arranged = super().arrange(request, prefix, rest, waiting)
        self._known = request, prefix, rest, arranged
        return arranged

    def forecast(self, request: RequestedDocuments, prefix: Ranks, rest: list[int]) -> list[int]:
        """Return the order of `rest` for the expected requests, even if `pays` is False."""
        known, self._known = self._known, GatedTail._known
        # With fused reuse only a part of the rest was arranged for serving.
        if known[0] is request and known[1:3] == (prefix, rest):
            return known[3]
        return super().arrange(request, prefix, rest, ())


TailName = Literal["cohort", "earned", "free", "prefix", "queue"] | str
"""Registered names, listed for type checkers."""
