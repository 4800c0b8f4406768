"""Batch of orderings, each started on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from ragorder.ordering import Ordering

__all__ = ["Batch"]

D = TypeVar("D")


class Batch(Sequence[Ordering[D]], Generic[D]):
    """Orderings in serving order. `Ordering.index` is the request's position in the input.

        for ordering in orderer.order_batch(requests):
            serve(requests[ordering.index], ordering.documents)

    Access puts an ordering in flight, so serve while iterating. `indices` is the serving order.
    """

    def __init__(self, indices: Sequence[int], start: Callable[[int], Ordering[D]]) -> None:
        self.indices = indices
        self._start = start
        self._started: dict[int, Ordering[D]] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Ordering[D]]:
        return (self[place] for place in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Ordering[D]: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ordering[D]]: ...
    def __getitem__(self, place: int | slice) -> Ordering[D] | list[Ordering[D]]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        ordering = self._started.get(place)
        if ordering is None:
            ordering = self._started[place] = self._start(place)
        return ordering
