"""An httpx2 transport to an application in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast
from urllib.parse import unquote

import httpx2
from starlette.types import ASGIApp, Message, Scope

# Chunks of an answer that wait for a slow reader before the application has to.
_MAX_QUEUED = 16


class AppTransport(httpx2.AsyncBaseTransport):
    """Streams an ASGI application's responses. Closing one, or cancelling the wait for it, cancels the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises ReadTimeout, or RemoteProtocolError if the application breaks off."""
        exchange = _Exchange(self._app, request)
        try:
            start = await exchange.next_message()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx2.Response(start["status"], headers=start.get("headers", []), stream=exchange)


class _Exchange(httpx2.AsyncByteStream):
    def __init__(self, app: ASGIApp, request: httpx2.Request) -> None:
        self._body = aiter(cast(httpx2.AsyncByteStream, request.stream))
        self._timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_QUEUED)
        self._work = asyncio.create_task(self._run(app, _scope(request)))

    async def next_message(self) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await self._messages.get()
        except TimeoutError:
            raise httpx2.ReadTimeout("the application did not answer in time") from None
        if message is None:
            raise httpx2.RemoteProtocolError("the application broke off")
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.next_message()
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body

    async def aclose(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        # Its errors may quote the request: the application itself logs errors.
        with suppress(Exception):
            await app(scope, self._receive, self._messages.put)
        await self._messages.put(None)

    async def _receive(self) -> Message:
        body = await anext(self._body, None)
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": True}
        self._body = _nothing()
        return {"type": "http.request", "body": b"", "more_body": False}


async def _nothing() -> AsyncIterator[bytes]:
    """Wait forever: a disconnect cancels the application instead of sending a message."""
    await asyncio.Event().wait()
    yield b""


def _scope(request: httpx2.Request) -> Scope:
    path, _, query = request.extensions.get("target", request.url.raw_path).partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": None,
    }
