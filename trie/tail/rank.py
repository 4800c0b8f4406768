"""Tail in retrieval order (RAGCache++ Algorithm 1, line 12)."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tree import RequestedDocuments

__all__ = ["RankTail"]


@tails.register("prefix", "only the cached prefix moves, all other documents stay as ranked (RAGCache++)")
class RankTail(Tail):
    """The most relevant document first."""

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        return rest
