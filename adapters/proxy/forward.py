"""Passes requests on and answers back, and cancels the one when the client of the other has gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import anyio
from starlette.types import Receive, Scope, Send

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.http_server.headers import Headers, end_to_end, header, is_json, without
from ragorder.adapters.http_server.request_body import ClientGoneError, Incoming
from ragorder.adapters.http_server.room import Held, Room
from ragorder.adapters.proxy.ordering import BodyOrderer, ReadBody, Route
from ragorder.adapters.proxy.settling import Ordered
from ragorder.adapters.proxy.target import target_of
from ragorder.adapters.proxy.turns import Turns
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.adapters.proxy.workers import Workers

__all__ = ["Forward"]

_ROUTES: dict[str, Route] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# So many bytes of a body go on at a time, so that there is no second copy of a long one.
_PIECE = 1 << 18
_NO_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Forward:
    """An ASGI application that passes every HTTP request on to the upstream server.

    The bodies of POST /v1/chat/completions and /v1/completions are read and ordered by `workers`; all others, and all
    answers, are passed on as they arrive. With `turns` each POST below /v1/ is read whole, and waits for its turn.
    `room` bounds the memory for bodies, `body_limit` the length of each, and `patience_s` the time that a client may
    take to send one. Raises ProxyError where there is no answer to pass on.
    """

    def __init__(
        self,
        upstream: Upstream,
        bodies: BodyOrderer,
        *,
        body_limit: int,
        room: Room,
        workers: Workers,
        patience_s: float | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._upstream = upstream
        self._bodies = bodies
        self._body_limit = body_limit
        self._room = room
        self._workers = workers
        self._patience_s = patience_s
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "no WebSocket here"})
            return
        request = self._bodies.request()
        with self._room.hold() as held, anyio.CancelScope() as client_is_there:
            incoming = Incoming(scope["headers"], receive, self._body_limit, held=held, patience_s=self._patience_s)
            leaving = asyncio.create_task(incoming.wait_until_gone(client_is_there))
            try:
                await self._exchange(scope, incoming, send, request, held)
            except ClientGoneError:
                pass
            finally:
                leaving.cancel()
                request.end()

    async def _exchange(self, scope: Scope, incoming: Incoming, send: Send, request: Ordered, held: Held) -> None:
        headers: Headers = scope["headers"]
        target = target_of(scope)
        posted = scope["method"] == "POST"
        route = _ROUTES.get(scope["path"]) if posted else None
        if header(headers, b"content-encoding") not in (None, b"identity"):
            route = None
        elif route is None and posted and is_json(headers):
            # Read only to see that no documents are in it, which this route would answer without.
            route = "other"
        turns = self._turns if posted and scope["path"].startswith("/v1/") else None
        async with AsyncExitStack() as until_answered:
            content: AsyncIterator[bytes] | None
            if route is None and turns is None:
                content = await incoming.stream()
            else:
                body = await self._in_turn(turns, route, await incoming.read(), request, held, until_answered)
                held.keep(len(body))
                # A body in one piece gets a length of its own.
                headers = [*without(headers, b"content-length"), (b"content-length", b"%d" % len(body))]
                content = _once([body], held)
                del body
            if request.ordering is not None:
                # What the server says of its cache must be readable.
                headers = [*without(headers, b"accept-encoding"), (b"accept-encoding", b"identity")]
            async with self._upstream.send(scope["method"], target, headers, content) as response:
                await self._answer(response.status_code, response.headers.raw, response.aiter_raw(), send, request)

    async def _in_turn(
        self,
        turns: Turns | None,
        route: Route | None,
        body: bytes,
        request: Ordered,
        held: Held,
        until_answered: AsyncExitStack,
    ) -> bytes:
        """The body as it goes on, with its documents ordered, once it may."""
        length = len(body)
        read = None
        if route is not None:
            read, kept = await self._workers.run(partial(self._read, route, body), length)
            held.keep(kept)
        if turns is not None:
            lengths = None if read is None else partial(self._bodies.predict_cached_tokens, read)
            waiting = await until_answered.enter_async_context(turns.take(read, lengths))
        else:
            waiting = []
        if read is None:
            return body
        if turns is not None:
            # The request that is chosen next is to find what this one has left.
            until_answered.callback(request.end)
        # The documents of a client that leaves meanwhile may be ordered only afterwards.
        return await self._workers.run(
            partial(self._bodies.order, read, request, waiting), length, abandoned=request.end
        )

    def _read(self, route: Route, body: bytes) -> tuple[ReadBody | None, int]:
        """The body with its documents, and how many bytes that keeps."""
        read = self._bodies.read(route, body)
        return read, len(body) if read is None else len(body) * (1 + _width(body))

    async def _answer(
        self, status: int, headers: Headers, chunks: AsyncIterator[bytes], send: Send, request: Ordered
    ) -> None:
        chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
        headers = end_to_end(headers)
        if chunked:
            # With both lengths the chunks count (RFC 9112 6.3), and it is those that were read.
            headers = without(headers, b"content-length")
        if not 200 <= status < 600 or any(_NO_HEADER.search(value) for _, value in headers):
            raise ProxyError(502, "The upstream server does not answer in HTTP.", code="upstream_unavailable")
        request.begin(status, headers)
        headers += request.headers()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for chunk in chunks:
            request.feed(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        request.complete = True
        await send({"type": "http.response.body", "body": b""})


async def _once(body: list[bytes], held: Held) -> AsyncIterator[bytes]:
    """The only body in the list, in pieces. It is not kept for as long as its answer takes."""
    whole = body.pop()
    for start in range(0, len(whole), _PIECE):
        yield whole[start : start + _PIECE]
    del whole
    held.keep(0)


def _width(body: bytes) -> int:
    """The bytes that a character of a text in it takes at most: CPython stores all as wide as the widest."""
    return 1 if body.isascii() and b"\\u" not in body else 4
