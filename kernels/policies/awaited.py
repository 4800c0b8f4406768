"""Nodes that waiting requests will use."""

from __future__ import annotations

from collections.abc import Iterable

from ragorder.trie.tree import Key

__all__ = ["AwaitedNodes"]


class AwaitedNodes:
    """Nodes on the paths of waiting requests, present or not, of `room` in all: those of the requests that came first.

    awaited = AwaitedNodes(room=100)
    added = awaited.add([("system prompt", 4), ("document", 9)])
    tier.evict(5, protected=awaited)
    awaited.remove(added)
    """

    def __init__(self, room: int) -> None:
        self._total = self._room = room
        self._requests: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def resize(self, room: int) -> None:
        """What is awaited already stays, beyond a smaller room too."""
        self._room += room - self._total
        self._total = room

    def add(self, path: Iterable[tuple[Key, int]]) -> tuple[Key, ...]:
        """The nodes (key, size) of a request, root first, as far as there is room. Remove what is returned, once."""
        added = []
        for key, size in path:
            if key not in self._requests:
                if size > self._room:
                    break
                self._room -= size
                self._sizes[key] = size
            self._requests[key] = self._requests.get(key, 0) + 1
            added.append(key)
        return tuple(added)

    def remove(self, keys: Iterable[Key]) -> None:
        """Raises KeyError for a node that is not awaited."""
        for key in keys:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._room += self._sizes.pop(key)
