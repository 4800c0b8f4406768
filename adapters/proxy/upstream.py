"""The upstream server and its connections."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import anyio
import httpx2

from ragorder.adapters.http_client import Server
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, end_to_end
from ragorder.adapters.proxy.bodies.body import Route

# Shorter than the five seconds after which uvicorn, and so vLLM, closes an idle connection.
_KEEP_ALIVE_S = 3.0
_MAX_IDLE = 128
# OpenAI's clients wait no longer.
_TRIES_S = 600.0
# Most bytes of an answer in the socket's buffer: the event loop takes all of them at once, and keeps them until the
# client reads.
_RECEIVE_BUFFER_BYTES = 1 << 16
_CHECK_S = 2.0
# vLLM, SGLang and others have the first one; all have the second.
_CHECKED_PATHS = (b"/health", b"/v1/models")
_NO_SUCH_PATH = (404, 405)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to connect, between two bytes, for a client to send 256 KiB, and until an answer begins, all tries
    together (None: ten minutes, or a longer `read_s`)."""

    connect_s: float = 10.0
    read_s: float = 600.0
    client_s: float = 30.0
    tries_s: float | None = None

    @property
    def all_tries_s(self) -> float:
        return max(_TRIES_S, self.read_s) if self.tries_s is None else self.tries_s


class UpstreamError(HTTPError):
    """The server gave no answer, or a part. Unless `connected`, the request has not reached it."""

    connected = True


class Upstream:
    """`api_key`, or the user and password in `address`, replace the client's Authorization or x-api-key. Raises
    AddressError."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        forwards_authorization: bool = True,
        timeouts: Timeouts = Timeouts(),
        make_transport: Callable[[], httpx2.AsyncBaseTransport] | None = None,
    ) -> None:
        with Server(address, timeout_s=1, api_key=api_key) as server:
            self.root = server.root
        self._url = httpx2.URL(self.root)
        self._authorization = _authorization(address, api_key)
        self._dropped = [b"host", b"expect"]
        if self._authorization or not forwards_authorization:
            self._dropped += [b"authorization", b"x-api-key"]
        limit = timeouts.read_s
        self._timeout = httpx2.Timeout(limit, connect=timeouts.connect_s, pool=None).as_dict()
        self._pool = _ConnectionPool(make_transport or _transport_factory(encrypted=self._url.scheme == "https"))

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Headers, content: AsyncIterator[bytes] | None
    ) -> AsyncIterator[httpx2.Response]:
        """Yield the unread response. Raises HTTPError, also while it is read."""
        sent = end_to_end(headers, *self._dropped) + self._authorization_like(headers)
        target = self._url.raw_path.rstrip(b"/") + target
        request = httpx2.Request(
            method, self._url, headers=sent, content=content, extensions={"timeout": self._timeout, "target": target}
        )
        try:
            # Some servers send a body after HEAD, and it may come late.
            async with self._pool.connection(once=method == "HEAD") as transport:
                response = await transport.handle_async_request(request)
                try:
                    yield response
                finally:
                    with anyio.CancelScope(shield=True):
                        await response.aclose()
        except httpx2.TimeoutException as error:
            message = "The upstream server did not answer in time."
            failure = UpstreamError(504, message, code="upstream_timeout")
            failure.connected = not isinstance(error, httpx2.ConnectTimeout)
            raise failure from None
        except httpx2.LocalProtocolError:
            message = "The request has a header or an address that is not valid HTTP."
            raise HTTPError(400, message, code="invalid_http") from None
        except httpx2.TransportError as error:
            message = "The upstream server cannot be reached, or closed the connection."
            failure = UpstreamError(502, message, code="upstream_unavailable")
            failure.connected = not isinstance(error, httpx2.ConnectError)
            raise failure from None

    async def answers(self) -> bool:
        status = 0
        try:
            async with asyncio.timeout(_CHECK_S):
                for path in _CHECKED_PATHS:
                    async with self.send("GET", path, [], None) as response:
                        status = response.status_code
                    if status not in _NO_SUCH_PATH:
                        break
        except (HTTPError, TimeoutError):
            return False
        return status < 500

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _authorization_like(self, headers: Headers) -> Headers:
        names = {name.lower() for name, _ in headers}
        as_header = b"x-api-key" in names and b"authorization" not in names
        prefix = b"Bearer "
        return [
            (b"x-api-key", value.removeprefix(prefix)) if as_header and value.startswith(prefix) else (name, value)
            for name, value in self._authorization
        ]


class _ConnectionPool:
    """Transports with one connection each: httpx2's pool scans all for each request. A connection with unread bytes,
    which would answer the next client, is closed."""

    def __init__(self, make: Callable[[], httpx2.AsyncBaseTransport]) -> None:
        self._make = make
        self._idle: deque[tuple[float, httpx2.AsyncBaseTransport]] = deque()

    @asynccontextmanager
    async def connection(self, *, once: bool = False) -> AsyncIterator[httpx2.AsyncBaseTransport]:
        transport = self._idle.pop()[1] if self._idle else self._make()
        try:
            yield transport
        finally:
            if once or _has_leftovers(transport):
                with anyio.CancelScope(shield=True):
                    await transport.aclose()
            else:
                self._idle.append((time.monotonic(), transport))
            await self._close_surplus()

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.popleft()[1].aclose()

    async def _close_surplus(self) -> None:
        expired = time.monotonic() - _KEEP_ALIVE_S
        while len(self._idle) > _MAX_IDLE or (self._idle and self._idle[0][0] < expired):
            with anyio.CancelScope(shield=True):
                await self._idle.popleft()[1].aclose()


def _transport_factory(*, encrypted: bool) -> Callable[[], httpx2.AsyncBaseTransport]:
    # A transport without a context makes its own, which costs time and memory.
    certificates = httpx2.create_ssl_context() if encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)]
    return lambda: httpx2.AsyncHTTPTransport(verify=certificates, limits=limits, socket_options=options)


def _authorization(address: str, api_key: str | None) -> Headers:
    if api_key and api_key.strip():
        return [(b"authorization", b"Bearer " + api_key.strip().encode("ascii"))]
    user_and_password = httpx2.URL(address.strip()).userinfo
    if not user_and_password:
        return []
    return [(b"authorization", b"Basic " + b64encode(unquote_to_bytes(user_and_password)))]


def _has_leftovers(transport: httpx2.AsyncBaseTransport) -> bool:
    """Return True also for a connection that cannot be inspected. httpx2 notices later bytes."""
    if not isinstance(transport, httpx2.AsyncHTTPTransport):
        return False
    try:
        connections: list[Any] = transport._pool.connections
        return any(_read_ahead(connection._connection) for connection in connections)
    except AttributeError:
        return True


def _read_ahead(connection: Any) -> bool:
    if connection._h11_state.trailing_data[0]:
        return True
    stream = connection._network_stream._stream
    if (below := getattr(stream, "transport_stream", None)) is not None:
        if stream._ssl_object.pending() or stream._read_bio.pending:
            return True
        stream = below
    return bool(stream._protocol.read_queue)


_MESSAGES = "/v1/messages"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(path: str, error: HTTPError) -> dict[str, Any]:
    return _of_messages(error) if path == _MESSAGES or path.startswith(f"{_MESSAGES}/") else error.content


def error_event(route: Route | None, error: HTTPError) -> bytes:
    name, content = b"", error.content
    if route == "messages":
        name, content = b"event: error\n", _of_messages(error)
    elif route == "responses":
        fields: dict[str, Any] = error.content["error"]
        name, content = b"event: error\n", {**fields, "type": "error", "sequence_number": 0}
    return name + b"data: " + json.dumps(content).encode() + b"\n\n"


def _of_messages(error: HTTPError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
