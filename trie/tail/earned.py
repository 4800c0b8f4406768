"""Tail that moves documents only where that has paid."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.tail.base import Waiting, tails
from ragorder.trie.tail.cohort import MIN_GAIN, CohortTail
from ragorder.trie.tail.free import FreeTail
from ragorder.trie.tree import RequestedDocuments

__all__ = ["EarnedTail"]


@tails.register("earned", "as free, but without waiting requests only while that has paid, else as prefix")
class EarnedTail(FreeTail):
    """`FreeTail` for waiting requests and while `pays`, else rank order. Whoever measures what moves gain sets `pays`
    (`ragorder._earned.EarnedMoves`); it begins as False."""

    def __init__(self, min_gain: float = MIN_GAIN) -> None:
        super().__init__(min_gain)
        self.fallback = _GatedTail(min_gain)

    @property
    def pays(self) -> bool:
        return self._gate.pays

    @pays.setter
    def pays(self, pays: bool) -> None:
        self._gate.pays = pays

    def forecast(self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int]) -> list[int]:
        """The order of `rest` after `prefix` for the expected requests, whether that pays or not."""
        return self._gate.forecast(request, prefix, rest)

    @property
    def _gate(self) -> _GatedTail:
        assert isinstance(self.fallback, _GatedTail)
        return self.fallback


class _GatedTail(CohortTail):
    pays = False
    # The last forecast: it is asked for twice, for what is served and for what is measured.
    _known: tuple[RequestedDocuments | None, Sequence[int], list[int]] = None, (), []

    def arrange(
        self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int], waiting: Waiting
    ) -> list[int]:
        if not self.pays:
            return rest
        arranged = super().arrange(request, prefix, rest, waiting)
        self._known = request, prefix, arranged
        return arranged

    def forecast(self, request: RequestedDocuments, prefix: Sequence[int], rest: list[int]) -> list[int]:
        known, self._known = self._known, (None, (), [])
        if known[0] is request and known[1] == prefix:
            return known[2]
        return super().arrange(request, prefix, rest, ())
