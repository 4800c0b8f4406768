"""Default tail: for the waiting requests, else by popularity class."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.tail.base import Waiting, tails
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tree import RequestedDocuments

__all__ = ["AutoTail"]


class _PopularityClassTail(FrequencyTail):
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


@tails.register("auto", "for the waiting requests, and without any the popular documents first")
class AutoTail(QueueTail):
    """`QueueTail` while requests wait; else higher popularity classes first."""

    def __init__(self) -> None:
        super().__init__(_PopularityClassTail())

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        if not waiting:
            return self.fallback.arrange(request, prefix, rest, waiting)
        return super().arrange(request, prefix, rest, waiting)
