"""HTTP/1.1 connections with timeouts, a limit, and optional encryption."""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Generator
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragorder.adapters.http_server.errors import HTTPError

# Bytes of all header lines of a request together.
HEAD_LIMIT = 1 << 15
_PROBE_CONNECTIONS = 32
_FAREWELL_S = 0.5
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def timed_connections(
    client_s: float, limit: int, *, probes: Collection[str] = (), encryption: ssl.SSLContext | None = None
) -> type[H11Protocol]:
    """Return a uvicorn protocol for at most `limit` connections; above it only the paths `probes` are answered. A
    client has `client_s` seconds for its headers, the rest of an answered body, and to take a piece of the answer.
    uvicorn's own encryption would neither count nor time handshakes."""
    options = {"client_s": client_s, "limit": limit, "probes": frozenset(probes), "encryption": encryption}
    return type("Connection", (TimedConnection,), {**options, "idle": OrderedDict()})


class TimedConnection(H11Protocol):
    """At the limit a new connection replaces the one longest without a complete request."""

    client_s: ClassVar[float]
    limit: ClassVar[int]
    probes: ClassVar[frozenset[str]]
    idle: ClassVar[OrderedDict[TimedConnection, None]]
    encryption: ClassVar[ssl.SSLContext | None]

    _begun = False
    # Bytes received at the end of a handshake; None otherwise.
    _early: bytearray | None = None

    def connection_made(self, transport: Any) -> None:
        self._receive_timer = _Timer(self.loop, self.client_s, self._too_slow)
        self._send_timer = _Timer(self.loop, self.client_s, self._not_read)
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            if self.idle:
                self.idle.popitem(last=False)[0].transport.abort()
            elif len(self.connections) > self.limit + _PROBE_CONNECTIONS:
                transport.abort()
            else:
                self.app = self._answer_probes
        if not transport.is_closing():
            self.idle[self] = None
            self._receive_timer.set()
            if self.encryption is not None:
                self._early = bytearray()
                # Started at once: the client's first bytes must not be read as plain text.
                start = self.loop.start_tls(
                    transport, self, self.encryption, server_side=True, ssl_handshake_timeout=self.client_s
                )
                self._handshake = self.loop.create_task(self._encrypt(transport, _Begun(start)))

    async def _encrypt(self, transport: Any, handshake: _Begun) -> None:
        encrypted: Any = None
        try:
            encrypted = await handshake
        except OSError:
            transport.abort()
        if encrypted is None or encrypted.is_closing():
            # The loop does not always report a connection lost in its handshake.
            self.connection_lost(ConnectionAbortedError())
            return
        self.transport, self.flow, self.scheme = encrypted, FlowControl(encrypted), "https"
        early, self._early = self._early, None
        if early:
            self.data_received(bytes(early))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._receive_timer.stop()
        self._send_timer.stop()

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        self._begun = True
        super().data_received(data)
        if self._waits_for_client():
            self._receive_timer.set()
        else:
            self._receive_timer.stop()
            if self.transport.get_write_buffer_size() == 0:
                self._send_timer.stop()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > HEAD_LIMIT:
            # Pipelined requests are buffered until this one is answered.
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self._waits_for_client():
            return
        self.idle.pop(self, None)
        names = [name for name, _ in self.headers or ()]
        if self.cycle is not None and b"content-length" in names and b"transfer-encoding" in names:
            # RFC 9112 6.1: a server before this one may have seen the request end elsewhere.
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self._begun = False
        self.idle[self] = None
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._receive_timer.set()
        if self.transport.get_write_buffer_size() > 0:
            self._send_timer.set()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing() and self.transport.get_write_buffer_size() == 0:
            # Few clients listen on an idle connection: the loop would wait for the end of their encryption.
            self.loop.call_later(_FAREWELL_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer.stop()
        self._send_timer.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timer.stop()

    async def _answer_probes(self, scope: Any, receive: Any, send: Any) -> None:
        if len(self.connections) <= self.limit or scope["path"] in self.probes:
            await self.config.loaded_app(scope, receive, send)
            return
        message = f"All {self.limit:,} connections are in use (--max-connections): try again later."
        headers = [(b"retry-after", b"1"), (b"connection", b"close")]
        await HTTPError(503, message, code="too_many_connections", headers=headers).send(send)

    def _waits_for_client(self) -> bool:
        if self.conn.their_state is h11.SEND_BODY:
            return self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._begun and self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.write(_TOO_SLOW)
        self.transport.close()
        # Unsent data keeps a closed connection open.
        self.loop.call_later(self.client_s, self.transport.abort)

    def _not_read(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()


class _Begun:
    """Takes a coroutine's first step at once, as Python 3.12's `eager_start`."""

    def __init__(self, coroutine: Coroutine[Any, None, Any]) -> None:
        self._coroutine = coroutine
        self._waits_for = coroutine.send(None)

    def __await__(self) -> Generator[Any, None, Any]:
        yield self._waits_for
        return (yield from self._coroutine.__await__())


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float, act: Callable[[], None]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._act()
