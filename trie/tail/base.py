"""Interface of a tail policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from ragorder.trie.tree import Key

__all__ = ["Tail", "Waiting"]

Waiting = Sequence[frozenset[Key]]
"""The document keys of each request that already waits, next first."""


class Tail(Protocol):
    """Orders the documents after the cached prefix for the requests to come.

    All of a request's documents are given by key in rank order; a document is named by its rank.
    """

    def observe(self, keys: Sequence[Key]) -> None: ...

    def observing(self, keys: Sequence[Key]) -> AbstractContextManager[None]:
        """A block in which the request counts as observed, and after which it does not."""

    def copy(self) -> Self:
        """An independent policy that has observed the same requests."""

    def arrange(self, keys: Sequence[Key], prefix: Sequence[int], rest: list[int], waiting: Waiting) -> list[int]:
        """The ranks in `rest` (in rank order) in the order in which they are to follow `prefix`."""
