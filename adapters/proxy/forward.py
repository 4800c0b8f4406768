"""Passes requests on and answers back, and cancels the one when the client of the other has gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.types import Receive, Scope, Send

from ragorder.adapters.proxy.errors import ProxyError
from ragorder.adapters.proxy.headers import Headers, end_to_end, header, without
from ragorder.adapters.proxy.incoming import ClientGoneError, Incoming
from ragorder.adapters.proxy.ordering import BodyOrderer, ReadBody, Route
from ragorder.adapters.proxy.settling import Ordered
from ragorder.adapters.proxy.turns import Turns
from ragorder.adapters.proxy.upstream import Upstream

__all__ = ["Forward"]

T = TypeVar("T")

_ROUTES: dict[str, Route] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# Up to here, in bytes, a body takes less time than another thread would.
_LONG = 1 << 18
_NO_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Forward:
    """An ASGI application that passes every HTTP request on to the upstream server.

    The bodies of POST /v1/chat/completions and /v1/completions are read and ordered, in a thread if they are long or
    `in_thread` says so; all others, and all answers, are passed on as they arrive. With `turns` each POST below /v1/ is
    read whole, and waits for its turn. Raises ProxyError where there is no answer to pass on.
    """

    def __init__(
        self, upstream: Upstream, bodies: BodyOrderer, *, body_limit: int, in_thread: bool, turns: Turns | None = None
    ) -> None:
        self._upstream = upstream
        self._bodies = bodies
        self._body_limit = body_limit
        self._in_thread = in_thread
        self._one_thread = anyio.CapacityLimiter(1)
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "no WebSocket here"})
            return
        request = self._bodies.request()
        incoming = Incoming(scope["headers"], receive, self._body_limit)
        with anyio.CancelScope() as client_is_there:
            leaving = asyncio.create_task(incoming.wait_until_gone(client_is_there))
            try:
                await self._exchange(scope, incoming, send, request)
            except ClientGoneError:
                pass
            finally:
                leaving.cancel()
                request.end()

    async def _exchange(self, scope: Scope, incoming: Incoming, send: Send, request: Ordered) -> None:
        headers: Headers = scope["headers"]
        target: bytes = scope["raw_path"]
        if not target.startswith(b"/"):
            raise ProxyError(400, "The address of a request must be a path.", code="invalid_http")
        if (header(headers, b"upgrade") or b"").lower() == b"websocket":
            raise ProxyError(400, "WebSocket is not passed on.", code="no_websocket")
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        posted = scope["method"] == "POST"
        route = _ROUTES.get(scope["path"]) if posted else None
        if route is not None and header(headers, b"content-encoding") not in (None, b"identity"):
            route = None
        turns = self._turns if posted and scope["path"].startswith("/v1/") else None
        async with AsyncExitStack() as until_answered:
            content: bytes | AsyncIterator[bytes] | None
            if route is None and turns is None:
                content = await incoming.stream()
                has_length = not incoming.chunked
            else:
                content = await self._in_turn(turns, route, await incoming.read(), request, until_answered)
                # A body in one piece gets a length of its own.
                has_length = False
            if not has_length:
                headers = without(headers, b"content-length")
            if request.ordering is not None:
                # What the server says of its cache must be readable.
                headers = [*without(headers, b"accept-encoding"), (b"accept-encoding", b"identity")]
            async with self._upstream.send(scope["method"], target, headers, content) as response:
                await self._answer(response.status_code, response.headers.raw, response.aiter_raw(), send, request)

    async def _in_turn(
        self, turns: Turns | None, route: Route | None, body: bytes, request: Ordered, until_answered: AsyncExitStack
    ) -> bytes:
        """The body as it goes on, with its documents ordered, once it may."""
        if turns is None:
            return await self._run(partial(self._order, route, body, request), len(body))
        read = await self._run(partial(self._read, route, body), len(body))
        lengths = None if read is None else partial(self._bodies.foretell, read)
        waiting = await until_answered.enter_async_context(turns.take(read, lengths))
        if read is None:
            return body
        # Whoever is chosen next is to find what this one has left.
        until_answered.callback(request.end)
        return await self._run(partial(self._bodies.order, read, request, waiting), len(body))

    def _read(self, route: Route | None, body: bytes) -> ReadBody | None:
        return None if route is None else self._bodies.read(route, body)

    def _order(self, route: Route | None, body: bytes, request: Ordered) -> bytes:
        read = self._read(route, body)
        return body if read is None else self._bodies.order(read, request)

    async def _run(self, work: Callable[[], T], length: int) -> T:
        """Do what takes long, with a body of such a length, in a thread."""
        if self._in_thread or length > _LONG:
            return await anyio.to_thread.run_sync(work, limiter=self._one_thread)
        return work()

    async def _answer(
        self, status: int, headers: Headers, chunks: AsyncIterator[bytes], send: Send, request: Ordered
    ) -> None:
        headers = end_to_end(headers)
        if not 200 <= status < 600 or any(_NO_HEADER.search(value) for _, value in headers):
            raise ProxyError(502, "The upstream server does not answer in HTTP.", code="upstream_unavailable")
        request.begin(status, headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for chunk in chunks:
            request.feed(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        request.complete = True
        await send({"type": "http.response.body", "body": b""})
