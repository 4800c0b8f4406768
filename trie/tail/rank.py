"""Tail in retrieval order (RAGCache++ Algorithm 1, line 12)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from ragorder.trie.tail.base import Waiting
from ragorder.trie.tree import Key

__all__ = ["RankTail"]


class RankTail:
    """The most relevant document first."""

    def observe(self, keys: Sequence[Key]) -> None:
        pass

    def observing(self, keys: Sequence[Key]) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self) -> Self:
        return self

    def arrange(self, keys: Sequence[Key], prefix: Sequence[int], rest: list[int], waiting: Waiting) -> list[int]:
        return rest
