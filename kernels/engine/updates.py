"""Updates of requests, until they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from ragorder.kernels.engine.request import Update

__all__ = ["UpdateQueues"]


class UpdateQueues:
    """A queue for each subscribed request's updates, and one for the others."""

    def __init__(self) -> None:
        self._others: list[Update] = []
        self._subscribed: dict[int, list[Update]] = {}

    def __bool__(self) -> bool:
        return bool(self._others)

    def put(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self._subscribed.get(update.request_id, self._others).append(update)

    def take(self) -> list[Update]:
        taken, self._others = self._others, []
        return taken

    def subscribe(self, request_id: int) -> None:
        self._subscribed[request_id] = []

    def take_for(self, request_id: int) -> list[Update]:
        taken, self._subscribed[request_id] = self._subscribed[request_id], []
        return taken

    def unsubscribe(self, request_id: int) -> None:
        self._subscribed.pop(request_id, None)
