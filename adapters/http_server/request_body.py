"""The request that comes in: its body, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
from starlette.types import Message, Receive

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.http_server.headers import Headers, header
from ragorder.adapters.http_server.room import Held, Room

__all__ = ["ClientGoneError", "Incoming"]

# So many bytes of a body give its client the whole time again.
_PIECE = 1 << 18
# Of a piece that is passed on there are copies on both sides of it, and the next one waits in the connection.
_COPIES = 4
_CLOSE = [(b"connection", b"close")]


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class Incoming:
    """The body of a request, of at most `limit` bytes, whose length is not declared if it is `chunked`; and whether its
    client is still there.

    `held` counts the bytes that are kept of it. A client that takes longer than `patience_s` seconds for 256 KiB, or
    for the end, gets a 408 (None: it has all the time).
    """

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        limit: int,
        *,
        held: Held | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._receive = receive
        self._limit = limit
        self._held = held or Held(Room(limit))
        self._patience_s = patience_s
        self._received = asyncio.Event()
        self._length = 0
        self.chunked = header(headers, b"transfer-encoding") is not None
        self._declared = header(headers, b"content-length")

    async def read(self) -> bytes:
        """The whole body. Raises ProxyError if it has two lengths, is too long, or comes too slowly."""
        self._check_declared()
        chunks: list[bytes] = []
        try:
            async for chunk in self._chunks():
                self._held.add(len(chunk))
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            # The traceback of a refusal would keep them until that is sent.
            chunks.clear()

    async def stream(self) -> AsyncIterator[bytes] | None:
        """The body as it comes, None for a request without. Raises ProxyError for two lengths, and for a body that is
        too long: at once if it says so, else when it has become so."""
        self._check_declared()
        if self.chunked or (self._declared or b"0").strip(b"0"):
            return self._pieces()
        async for _ in self._chunks():
            pass
        return None

    async def wait_until_gone(self, client_is_there: anyio.CancelScope) -> None:
        """Cancel when the client has closed the connection."""
        await self._received.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        client_is_there.cancel()

    async def _pieces(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks():
            self._held.keep(_COPIES * len(chunk))
            yield chunk
        self._held.keep(0)

    async def _chunks(self) -> AsyncIterator[bytes]:
        more, left_s, pieces = True, self._patience_s, 0
        clock = asyncio.get_running_loop().time
        while more:
            since = clock()
            message = await self._next(left_s)
            if left_s is not None:
                left_s -= clock() - since
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk, more = message.get("body", b""), message.get("more_body", False)
            self._length += len(chunk)
            if self._length > self._limit:
                raise self._too_long()
            if self._length // _PIECE > pieces:
                pieces, left_s = self._length // _PIECE, self._patience_s
            if not more:
                self._received.set()
            if chunk:
                yield chunk

    async def _next(self, left_s: float | None) -> Message:
        """What comes next, if it comes in time: a client that is told so has also sent what was there already."""
        try:
            async with asyncio.timeout(left_s):
                return await self._receive()
        except TimeoutError:
            message = f"The body came too slowly: 256 KiB may take {self._patience_s:g} s (--client-timeout)."
            raise ProxyError(408, message, code="body_too_slow", headers=_CLOSE) from None

    def _check_declared(self) -> None:
        if self.chunked and self._declared is not None:
            # What stands in front of the proxy may have seen another end of this request (RFC 9112 6.3).
            message = "The request has both Content-Length and Transfer-Encoding: send one of them."
            raise ProxyError(400, message, code="invalid_http", headers=_CLOSE)
        digits = self._declared or b"0"
        if not digits.isdigit() or len(digits) > 18 or int(digits) > self._limit:
            raise self._too_long()

    def _too_long(self) -> ProxyError:
        message = f"The body is longer than the {self._limit:,} bytes that the proxy takes (--body-limit)."
        return ProxyError(413, message, code="body_too_large", headers=_CLOSE)
