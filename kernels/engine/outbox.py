"""Updates on their way to whoever waits for them."""

from __future__ import annotations

from collections.abc import Iterable

from ragorder.kernels.engine.request import Update

__all__ = ["Outbox"]


class Outbox:
    """Updates of requests that somebody follows are kept for them alone; the others are for whoever takes them."""

    def __init__(self) -> None:
        self._untaken: list[Update] = []
        self._followed: dict[int, list[Update]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything for whoever takes it."""
        return bool(self._untaken)

    def tell(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self._followed.get(update.request_id, self._untaken).append(update)

    def take(self) -> list[Update]:
        taken, self._untaken = self._untaken, []
        return taken

    def follow(self, request_id: int) -> None:
        self._followed[request_id] = []

    def of(self, request_id: int) -> list[Update]:
        """What has come for a request that is followed, once."""
        come, self._followed[request_id] = self._followed[request_id], []
        return come

    def unfollow(self, request_id: int) -> None:
        """What comes for it from now on is nobody's, and what has come is forgotten."""
        self._followed.pop(request_id, None)
