"""Tail for the waiting requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy as shallow_copy
from typing import Self

from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tail.rank import RankTail
from ragorder.trie.tree import Key, Node, RequestedDocuments

__all__ = ["QueueTail"]


@tails.register("queue", "for the waiting requests, and without any as ranked")
class QueueTail(Tail):
    """Next come the documents of most waiting requests, among those that can still share the prefix.

    Once none can, the fallback policy (by default rank order) arranges the rest.
    """

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

    def coming_uses(
        self, request: RequestedDocuments, placed: Sequence[int], candidates: Sequence[int]
    ) -> Sequence[float]:
        return self.fallback.coming_uses(request, placed, candidates)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.fallback = self.fallback.copy()
        return copy

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
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
