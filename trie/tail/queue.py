"""Tail for the waiting requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy as shallow_copy
from typing import Self

from ragorder.trie.tail.base import Tail, Waiting
from ragorder.trie.tree import Key

__all__ = ["QueueTail"]


class QueueTail:
    """Next come the documents that most of the waiting requests want, among those that can still share the prefix.

    Once no waiting request can share, the fallback policy arranges the rest.
    """

    def __init__(self, fallback: Tail) -> None:
        self.fallback = fallback

    def observe(self, keys: Sequence[Key]) -> None:
        self.fallback.observe(keys)

    def observing(self, keys: Sequence[Key]) -> AbstractContextManager[None]:
        return self.fallback.observing(keys)

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.fallback = self.fallback.copy()
        return copy

    def arrange(self, keys: Sequence[Key], prefix: Sequence[int], rest: list[int], waiting: Waiting) -> list[int]:
        rest = self.fallback.arrange(keys, prefix, rest, waiting)
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
