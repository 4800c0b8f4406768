"""Lifespan of an ASGI application without a server."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

__all__ = ["Lifespan"]


class Lifespan:
    """Starts an application before its first request, and ends it. Both are idempotent; for one event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._given: asyncio.Queue[Message] = asyncio.Queue()
        self._answered: asyncio.Queue[Message] = asyncio.Queue()
        self._lock = asyncio.Lock()
        self._run: asyncio.Task[None] | None = None
        self._start: asyncio.Task[asyncio.Task[None]] | None = None

    async def begin(self) -> None:
        """Raises RuntimeError if the application cannot start."""
        if self._run is not None:
            return
        async with self._lock:
            if self._run is not None:
                return
            # After a cancelled request the next one starts the application.
            if self._start is None or (self._start.done() and (self._start.cancelled() or self._start.exception())):
                self._start = asyncio.ensure_future(self._begun())
            self._run = await asyncio.shield(self._start)

    async def end(self) -> None:
        if self._run is not None and not self._run.done():
            await self._ask("lifespan.shutdown", self._run)

    async def _begun(self) -> asyncio.Task[None]:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        run = asyncio.ensure_future(self._quietly(scope))
        answer = await self._ask("lifespan.startup", run)
        if answer is not None and answer["type"] == "lifespan.startup.failed":
            raise RuntimeError("the engine's application cannot start")
        return run

    async def _ask(self, what: str, run: asyncio.Task[None]) -> Message | None:
        self._given.put_nowait({"type": what})
        answer = asyncio.ensure_future(self._answered.get())
        await asyncio.wait([answer, run], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return None

    async def _quietly(self, scope: Message) -> None:
        try:
            await self._app(scope, self._given.get, self._answered.put)
        except Exception:
            # An application without a lifespan raises, and a server continues.
            return
