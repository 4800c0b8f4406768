"""Due generations that wait for room on the engine (RAGCache section 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths

__all__ = ["EngineQueue"]

T = TypeVar("T")


class EngineQueue(Generic[T]):
    """Generations that wait while `limit` are on the engine (None: none waits).

    Next is the one with the largest cached / computed length of its prompt; one that `window` later ones have overtaken
    goes first. Raises ValueError for a limit below 1 or a negative window.
    """

    def __init__(self, limit: int | None = None, window: int = 32) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_generations must be at least 1, or None, got {limit}")
        self.limit = limit
        self._waiting: CacheAwareQueue[T] = CacheAwareQueue(window)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def largest_overtaking(self) -> int:
        """Later generations that have overtaken one, at most so far."""
        return self._waiting.largest_overtaking

    def has_room(self, running: int) -> bool:
        return self.limit is None or running < self.limit

    def enter(self, generation: T, lengths: Callable[[], CachedLengths] | None) -> Callable[[], object]:
        """Returns a function that takes it out again."""
        return partial(self._waiting.leave, self._waiting.enter(generation, lengths))

    def take(self) -> T:
        """Raises IndexError if none waits."""
        return self._waiting.take().item
