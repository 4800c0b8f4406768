"""Bounded reading of request bodies, and detection of disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from starlette.types import Message, Receive

from ragorder.adapters.http_server.content_encoding import decoded
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, header
from ragorder.errors import RagorderError


class MemoryBudget:
    """At most `limit` bytes for the bodies of all requests; one alone may have more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        share = MemoryShare(self)
        try:
            yield share
        finally:
            share.resize(0)


class MemoryShare:
    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def resize(self, count: int) -> None:
        """Raises HTTPError if the budget is exhausted."""
        more = count - self._bytes
        if more > 0 and self._budget.used + more > self._budget.limit and self._budget.used > self._bytes:
            raise HTTPError(
                503,
                f"The bodies of other requests fill the {self._budget.limit >> 20:,} MiB for request bodies "
                "(--bodies-limit): try again later.",
                code="no_room_for_body",
                headers=[(b"retry-after", b"1"), (b"connection", b"close")],
            )
        self._budget.used += more
        self._bytes = count

    def add(self, count: int) -> None:
        self.resize(self._bytes + count)


# The client's time restarts after this many bytes of a body.
_PIECE = 1 << 18
# A forwarded chunk is copied on both sides, and the next one waits in the connection.
_COPIES = 4
_CLOSE = [(b"connection", b"close")]


class ClientGoneError(RagorderError):
    """The client disconnected before its request was complete."""


class RequestBody:
    """Body of at most `limit` bytes, decoded from `encoding`; `share` counts the bytes kept. A client that needs more
    than `client_s` seconds for 256 KiB gets a 408."""

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        limit: int,
        share: MemoryShare | None = None,
        client_s: float | None = None,
        encoding: str | None = None,
    ) -> None:
        self._receive = receive
        self._encoding = encoding
        self._limit = limit
        self._share = share or MemoryShare(MemoryBudget(limit))
        self._client_s = client_s
        self._received = asyncio.Event()
        self._length = 0
        self.chunked = header(headers, b"transfer-encoding") is not None
        self._declared = header(headers, b"content-length")

    async def read(self) -> bytes:
        """Raises ClientGoneError, and HTTPError for two lengths or a long, slow or damaged body."""
        body = await self._received_whole()
        return body if self._encoding is None else await self._decoded(body, self._encoding)

    async def _received_whole(self) -> bytes:
        self._check_declared()
        chunks: list[bytes] = []
        try:
            async for chunk in self._chunks():
                self._share.add(len(chunk))
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            # Otherwise a refusal's traceback would keep them until it is sent.
            chunks.clear()

    async def _decoded(self, body: bytes, encoding: str) -> bytes:
        chunks: list[bytes] = []
        length = 0
        try:
            for piece in decoded(body, encoding):
                length += len(piece)
                if length > self._limit:
                    raise self._too_long()
                self._share.add(len(piece))
                if piece:
                    chunks.append(piece)
                # Let other tasks run.
                await asyncio.sleep(0)
            return b"".join(chunks)
        finally:
            chunks.clear()
            self._share.add(-len(body))

    async def stream(self) -> AsyncIterator[bytes] | None:
        """Return the chunks, or None without a body. Raises HTTPError, for wrong headers at once."""
        self._check_declared()
        if self.chunked or (self._declared or b"0").strip(b"0"):
            return self._pieces()
        async for _ in self._chunks():
            pass
        return None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        with anyio.CancelScope() as block:
            watch = asyncio.create_task(self._cancel_when_gone(block))
            try:
                yield
            except ClientGoneError:
                pass
            finally:
                watch.cancel()

    async def _cancel_when_gone(self, block: anyio.CancelScope) -> None:
        await self._received.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        block.cancel()

    async def _pieces(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks():
            self._share.resize(_COPIES * len(chunk))
            yield chunk
        self._share.resize(0)

    async def _chunks(self) -> AsyncIterator[bytes]:
        more, left_s, pieces = True, self._client_s, 0
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
                pieces, left_s = self._length // _PIECE, self._client_s
            if not more:
                self._received.set()
            if chunk:
                yield chunk

    async def _next(self, left_s: float | None) -> Message:
        try:
            async with asyncio.timeout(left_s):
                return await self._receive()
        except TimeoutError:
            message = f"The body arrived too slowly: 256 KiB may take {self._client_s:g} s (--client-timeout)."
            raise HTTPError(408, message, code="body_too_slow", headers=_CLOSE) from None

    def _check_declared(self) -> None:
        if self.chunked and self._declared is not None:
            # A server before this one may have seen the request end elsewhere (RFC 9112 6.3).
            message = "The request has both Content-Length and Transfer-Encoding: send one of them."
            raise HTTPError(400, message, code="invalid_http", headers=_CLOSE)
        digits = self._declared or b"0"
        if not digits.isdigit() or len(digits) > 18 or int(digits) > self._limit:
            raise self._too_long()

    def _too_long(self) -> HTTPError:
        message = f"The body is longer than {self._limit:,} bytes, the limit of this server (--body-limit): send less."
        return HTTPError(413, message, code="body_too_large", headers=_CLOSE)
