"""LRU cache bounded in entries and bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

from ragorder.common.lock import follow

V = TypeVar("V")


class LRUCache(Generic[V]):
    """At most `entries` values of `size` bytes in total. Thread-safe. Keys are not counted, so use digests."""

    def __init__(self, entries: int, size: int = sys.maxsize) -> None:
        self._entries = entries
        self._size = size
        self._used = 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        follow(self)

    def __len__(self) -> int:
        return len(self._values)

    def after_fork(self) -> None:
        """Empty the cache: another thread may have been inside `put`."""
        self._lock = Lock()
        self._values, self._used = OrderedDict(), 0

    @property
    def used(self) -> int:
        return self._used

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            kept = self._values.get(key)
            if kept is None:
                return None
            self._values.move_to_end(key)
            return kept[0]

    def put(self, key: Hashable, value: V, size: int = 0) -> None:
        with self._lock:
            if key in self._values:
                self._used -= self._values.pop(key)[1]
            if size > self._size:
                return
            self._values[key] = value, size
            self._used += size
            while len(self._values) > self._entries or self._used > self._size:
                self._used -= self._values.popitem(last=False)[1][1]
