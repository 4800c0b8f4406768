"""Tail by popularity class."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.tail.base import Waiting, tails
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tree import RequestedDocuments

__all__ = ["PopularityTail"]


@tails.register("popularity", "documents first that are requested 8 times as often")
class PopularityTail(FrequencyTail):
    """Documents an order of magnitude (8 times) more popular first; within a class, rank order. Exact frequency order
    loses on bursts: small differences tear apart what rank order keeps together."""

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        keys, count, weight = request.keys, self._counts.get, self._weight
        classes = [-((int(count(keys[rank], 0.0) / weight).bit_length() + 2) // 3) for rank in rest]
        if len(set(classes)) < 2:
            return rest
        return [rank for _, rank in sorted(zip(classes, rest, strict=True))]
