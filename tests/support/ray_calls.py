"""Calls of a deployment without Ray: handles that give what a test says."""

from __future__ import annotations

import asyncio
from typing import Any


class Items:
    """The items of a replica's answer, or the error at their place."""

    def __init__(self, *items: Any) -> None:
        self.items = iter(items)
        self.cancelled = False

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> Any:
        item = next(self.items, None)
        if item is None:
            raise StopAsyncIteration
        if item == "wait":
            await asyncio.Event().wait()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Gives these answers, one for each call; keeps the sessions and requests of the calls."""

    def __init__(self, *answers: Items, calls: list[Any] | None = None, session: str | None = None) -> None:
        self.answers = answers
        self.calls = [] if calls is None else calls
        self.session = session

    def options(self, *, session_id: str | None = None, **_: Any) -> Handle:
        return Handle(*self.answers, calls=self.calls, session=session_id)

    def remote(self, request: Any) -> Items:
        self.calls.append((self.session, request))
        return self.answers[len(self.calls) - 1]
