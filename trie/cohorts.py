"""Recent requests, indexed by document."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import Self

from ragorder.trie.tree import Key


class Cohorts:
    """The last `size` requests: `masks` has a bit mask of the requests that contain each document.

    Old requests are dropped beyond `max_documents` different documents (0.3 KB each).
    """

    def __init__(self, size: int = 2048, max_documents: int = 16_384) -> None:
        self.size = size
        self.max_documents = max_documents
        self.added = 0
        self._first = 0
        self.masks: dict[Key, int] = {}
        self._requests: list[Sequence[Key]] = [()] * size
        self.all = (1 << size) - 1

    def __len__(self) -> int:
        return self.added - self._first

    def add(self, keys: Sequence[Key]) -> list[int]:
        if len(self) == self.size:
            self._drop_first()
        masks = self.masks
        bit = self.added % self.size
        mask = 1 << bit
        self._requests[bit] = keys
        self.added += 1
        former = []
        for key in keys:
            known = masks.get(key, 0)
            former.append(known)
            masks[key] = known | mask
        while len(masks) > self.max_documents and self._first < self.added:
            self._drop_first()
        return former

    def latest(self, count: int) -> int:
        """Return the mask of the last `count` requests, at most `size`."""
        mask = ((1 << count) - 1) << (self.added - count) % self.size
        return (mask | mask >> self.size) & self.all

    def newest(self, mask: int) -> Sequence[Key]:
        wrapped = mask & (1 << self.added % self.size) - 1
        return self._requests[(wrapped or mask).bit_length() - 1]

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.masks = dict(self.masks)
        copy._requests = list(self._requests)
        return copy

    def _drop_first(self) -> None:
        masks = self.masks
        bit = self._first % self.size
        keys, others = self._requests[bit], self.all ^ (1 << bit)
        self._first += 1
        self._requests[bit] = ()
        for key in keys:
            left = masks.get(key, 0) & others
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)
