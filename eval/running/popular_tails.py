"""Baseline tails: the most requested documents first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from typing import Self

from ragorder.trie.tail import Tail, Waiting, tails
from ragorder.trie.tree import Key, RequestedDocuments

__all__ = ["FrequencyTail", "PopularityTail"]

_RESCALE = 1e200


@tails.register("frequency", "the most requested documents first")
class FrequencyTail(Tail):
    """The most frequently requested document first, ties in rank order. A request counts half after `half_life` further
    ones. Of more than `max_documents` the rarer half is forgotten."""

    def __init__(self, half_life: int = 300, max_documents: int = 16_384) -> None:
        self.max_documents = max_documents
        self._growth = 2.0 ** (1 / half_life)
        # Instead of decaying every count, each new request weighs more than the one before.
        self._weight = 1.0
        self._counts: dict[Key, float] = {}

    def observe(self, request: RequestedDocuments) -> None:
        self._weight = weight = self._weight * self._growth
        counts = self._counts
        for key in request.keys:
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > self.max_documents:
            kept = sorted(counts.items(), key=lambda item: -item[1])[: self.max_documents // 2]
            self._counts = dict(kept)
        if weight > _RESCALE:
            self._counts = {key: count / weight for key, count in self._counts.items()}
            self._weight = 1.0

    @contextmanager
    def observing(self, request: RequestedDocuments) -> Iterator[None]:
        counts, weight = self._counts, self._weight
        before = {key: counts.get(key) for key in request.keys}
        self.observe(request)
        try:
            yield
        finally:
            self._counts, self._weight = counts, weight
            for key, count in before.items():
                if count is None:
                    del counts[key]
                else:
                    counts[key] = count

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy._counts = dict(self._counts)
        return copy

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        keys, counts = request.keys, self._counts
        return sorted(rest, key=lambda rank: -counts.get(keys[rank], 0.0))


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
