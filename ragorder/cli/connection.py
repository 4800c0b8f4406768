"""HTTP/1.1 connections whose clients have so much time, and no more."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.proxy.app import PROBES

__all__ = ["HEAD_LIMIT", "TimedConnection", "timed_connections"]

# All header lines of a request together, in bytes.
HEAD_LIMIT = 1 << 15
_FOR_PROBES = 32
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def timed_connections(client_s: float, most: int) -> type[H11Protocol]:
    """The protocol of a server that has at most `most` connections, and gives a client `client_s` seconds for each of:
    the header of a request, what it still sends when it has its answer, and taking a piece of the answer."""
    idle: OrderedDict[TimedConnection, None] = OrderedDict()
    return type("Connection", (TimedConnection,), {"client_s": client_s, "most": most, "idle": idle})


class TimedConnection(H11Protocol):
    """uvicorn's connection, which by itself waits for its client without end. See `timed_connections`.

    A new connection takes the place of the one that has been without a request for longest; half a header is no
    request. If each has one, probes alone are answered on the new one, so that a busy process is not taken for dead.
    """

    client_s: ClassVar[float]
    most: ClassVar[int]
    idle: ClassVar[OrderedDict[TimedConnection, None]]

    _begun = False

    def connection_made(self, transport: Any) -> None:
        self._to_send = _Alarm(self.loop, self.client_s, self._too_slow)
        self._to_take = _Alarm(self.loop, self.client_s, self._not_taken)
        super().connection_made(transport)
        if len(self.connections) > self.most:
            if self.idle:
                self.idle.popitem(last=False)[0].transport.abort()
            elif len(self.connections) > self.most + _FOR_PROBES:
                transport.abort()
            else:
                self.app = self._answer_probes
        if not transport.is_closing():
            self.idle[self] = None
            self._to_send.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._to_send.unset()
        self._to_take.unset()

    def data_received(self, data: bytes) -> None:
        self._begun = True
        super().data_received(data)
        if self._waits_for_client():
            self._to_send.set()
        else:
            self._to_send.unset()
            if self.transport.get_write_buffer_size() == 0:
                self._to_take.unset()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > HEAD_LIMIT:
            # Requests in advance are kept until this one is answered.
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self._waits_for_client():
            return
        self.idle.pop(self, None)
        names = [name for name, _ in self.headers or ()]
        if self.cycle is not None and b"content-length" in names and b"transfer-encoding" in names:
            # RFC 9112 6.1: what stands in front may have seen another end of this request.
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self._begun = False
        self.idle[self] = None
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._to_send.set()
        if self.transport.get_write_buffer_size() > 0:
            self._to_take.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._to_take.unset()
        self._to_take.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._to_take.unset()

    async def _answer_probes(self, scope: Any, receive: Any, send: Any) -> None:
        if len(self.connections) <= self.most or scope["path"] in PROBES:
            await self.config.loaded_app(scope, receive, send)
            return
        message = f"There are {self.most:,} connections already (--max-connections): try again later."
        headers = [(b"retry-after", b"1"), (b"connection", b"close")]
        await ProxyError(503, message, code="too_many_connections", headers=headers).send(send)

    def _waits_for_client(self) -> bool:
        """Whether nothing is being answered: what there is of a request is a part of its header, or the rest of a body
        that was answered before its end."""
        if self.conn.their_state is h11.SEND_BODY:
            return self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._begun and self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.write(_TOO_SLOW)
        self.transport.close()
        # What is still to be sent keeps a closed connection open.
        self.loop.call_later(self.client_s, self.transport.abort)

    def _not_taken(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()


class _Alarm:
    """Calls `act` once, `delay_s` after it is set, unless it is unset before. To set it twice is to set it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float, act: Callable[[], None]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self._ring)

    def unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._act()
