"""Addressable binary heap of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.kernels.policies.base import TierNode

__all__ = ["Entry", "NodeHeap"]

Entry = tuple[float, int, TierNode]
"""Priority, order of use (unique), node."""


class NodeHeap:
    """A binary heap whose nodes store their place: no stale entries."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    def add(self, node: TierNode) -> None:
        entry = (node.priority, node.order, node)
        self._entries.append(entry)
        self._rise(entry, len(self._entries) - 1)

    def remove(self, node: TierNode) -> None:
        place, node.place = node.place, -1
        last = self._entries.pop()
        if last[2] is not node:
            self._sift(last, place)

    def replace(self, node: TierNode, other: TierNode) -> None:
        """`remove` and `add` in one step: cheaper for nodes of similar priority."""
        place, node.place = node.place, -1
        self._sift((other.priority, other.order, other), place)

    def update(self, node: TierNode) -> None:
        self._sift((node.priority, node.order, node), node.place)

    def _sift(self, entry: Entry, place: int) -> None:
        if place and entry < self._entries[(place - 1) >> 1]:
            self._rise(entry, place)
        else:
            self._sink(entry, place)

    def _rise(self, entry: Entry, place: int) -> None:
        entries = self._entries
        while place:
            above = (place - 1) >> 1
            parent = entries[above]
            if parent < entry:
                break
            entries[place] = parent
            parent[2].place = place
            place = above
        entries[place] = entry
        entry[2].place = place

    def _sink(self, entry: Entry, place: int) -> None:
        entries = self._entries
        count = len(entries)
        while (child := 2 * place + 1) < count:
            below = entries[child]
            if child + 1 < count and entries[child + 1] < below:
                child += 1
                below = entries[child]
            if entry < below:
                break
            entries[place] = below
            below[2].place = place
            place = child
        entries[place] = entry
        entry[2].place = place
