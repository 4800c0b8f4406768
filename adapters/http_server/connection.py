"""HTTP/1.1 connections with timeouts and a limit on their number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragorder.adapters.http_server.errors import HTTPError

__all__ = ["HEAD_LIMIT", "TimedConnection", "timed_connections"]

# Bytes of all header lines of a request together.
HEAD_LIMIT = 1 << 15
_PROBE_CONNECTIONS = 32
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def timed_connections(client_s: float, limit: int, *, probes: Collection[str] = ()) -> type[H11Protocol]:
    """A uvicorn protocol for at most `limit` connections; beyond it only `probes` (paths) are answered. A client has
    `client_s` seconds for headers, for the rest of an answered body, and to take a piece of the answer."""
    idle: OrderedDict[TimedConnection, None] = OrderedDict()
    options = {"client_s": client_s, "limit": limit, "probes": frozenset(probes), "idle": idle}
    return type("Connection", (TimedConnection,), options)


class TimedConnection(H11Protocol):
    """At the limit a new connection replaces the one without a complete request for longest."""

    client_s: ClassVar[float]
    limit: ClassVar[int]
    probes: ClassVar[frozenset[str]]
    idle: ClassVar[OrderedDict[TimedConnection, None]]

    _begun = False

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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._receive_timer.stop()
        self._send_timer.stop()

    def data_received(self, data: bytes) -> None:
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
            # RFC 9112 6.1: a server in front may have seen this request end elsewhere.
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self._begun = False
        self.idle[self] = None
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._receive_timer.set()
        if self.transport.get_write_buffer_size() > 0:
            self._send_timer.set()

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
        """For the rest of a header, or of a body that was answered early."""
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
