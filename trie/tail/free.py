"""Tail for the waiting requests, else for those expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ragorder.trie.tail.base import Waiting, tails
from ragorder.trie.tail.cohort import MIN_GAIN, CohortTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tree import RequestedDocuments

__all__ = ["FreeTail"]


@tails.register("free", "documents move for the waiting requests, and without any for those expected, as cohort")
class FreeTail(QueueTail):
    """`QueueTail` while requests wait, else `CohortTail`."""

    fallback: CohortTail

    def __init__(self, min_gain: float = MIN_GAIN) -> None:
        super().__init__(CohortTail(min_gain))

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings.min_gain)

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        if not waiting:
            return self.fallback.arrange(request, prefix, rest, waiting)
        return super().arrange(request, prefix, rest, waiting)
