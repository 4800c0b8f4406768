"""Documents that a fused request computes exactly although it could take them over, for the requests to come."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import Self

from ragorder.settings import Settings
from ragorder.trie.tail import Tail
from ragorder.trie.tree import RequestedDocuments

__all__ = ["Investment"]


class Investment:
    """A document computed exactly, directly behind the exact prefix, although it could be taken over.

    This request computes all of its tokens instead of the share `recompute`; each later request with this prefix, as
    `tail` forecasts them, computes none of them instead of that share.
    """

    def __init__(self, settings: Settings, tail: Tail) -> None:
        self._invests = settings.invest
        self._recompute = settings.recompute
        self._min_gain = settings.min_gain
        self._tail = tail

    def copy(self, tail: Tail) -> Self:
        copy = shallow_copy(self)
        copy._tail = tail
        return copy

    def choose(
        self, request: RequestedDocuments, tokens: Sequence[int], prefix: Sequence[int], ranks: Sequence[int]
    ) -> list[int]:
        """Of the documents `ranks` those to compute behind `prefix`, next first. `tokens`: lengths by rank.

        Next comes the document that spares most tokens, if they pay for the places that it moves (`min_gain`).
        """
        placed, left = list(prefix), list(ranks)
        while left:
            best, most, moved = None, 0.0, 0.0
            for rank, gain in zip(left, self.gains(request, tokens, placed, left), strict=False):
                if gain - moved > most:
                    best, most = rank, gain - moved
                moved += self._min_gain
            if best is None:
                break
            left.remove(best)
            placed.append(best)
        return placed[len(prefix) :]

    def gains(
        self, request: RequestedDocuments, tokens: Sequence[int], placed: Sequence[int], candidates: Sequence[int]
    ) -> list[float]:
        """Tokens that each of `candidates` spares in all, computed behind `placed`; empty without a forecast."""
        if not self._invests:
            return []
        uses = self._tail.coming_uses(request, placed, candidates)
        recompute = self._recompute
        # Without a forecast there are no uses.
        return [
            (expected * recompute - (1 - recompute)) * tokens[rank]
            for rank, expected in zip(candidates, uses, strict=False)
        ]
