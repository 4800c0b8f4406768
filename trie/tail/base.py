"""Interface of a tail policy, and the registry of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from ragorder.trie.registry import Registry
from ragorder.trie.tree import Key, Node, RequestedDocuments

__all__ = ["Tail", "Waiting", "tails"]

Waiting = Sequence[frozenset[Key]]
"""The document keys of each request that already waits, next first."""


class Tail(ABC):
    """Orders the documents after the cached prefix for the requests to come; a document is named by its rank.

        @tails.register("reversed", "the least relevant document first")
        class ReversedTail(Tail):
            def arrange(self, request, prefix, rest, waiting):
                return rest[::-1]

    The defaults are those of a policy without memory: others override `observe`, `observing` and `copy`.
    """

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        """The policy for an orderer with these `ragorder.Settings`."""
        return cls()

    def observe(self, request: RequestedDocuments) -> None:  # noqa: B027
        """A request is about to be arranged."""

    def observing(self, request: RequestedDocuments) -> AbstractContextManager[None]:
        """A block within which the request counts as observed."""
        return nullcontext()

    def served(self, path: Sequence[Node]) -> None:  # noqa: B027
        """The engine has computed a request's path, from the root."""

    def expected_uses(self, keys: Sequence[Key]) -> Sequence[float]:
        """Requests to come that will contain the first document, the first two, …; empty without a forecast."""
        return ()

    def coming_uses(
        self, request: RequestedDocuments, placed: Sequence[int], candidates: Sequence[int]
    ) -> Sequence[float]:
        """For each of `candidates`, how many of the next `expected_uses.HORIZON` requests will contain it and all
        documents `placed`, all given by rank; empty without a forecast."""
        return ()

    def copy(self) -> Self:
        """An independent policy with the same memory."""
        return self

    @abstractmethod
    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        """The ranks in `rest` (in rank order) in the order in which they follow `prefix`."""


tails: Registry[Tail] = Registry("tail")
