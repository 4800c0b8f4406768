"""Answers held until their first token, for a retry elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Message, Send

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import header
from ragorder.adapters.proxy.fleet import requested_backoff_s
from ragorder.adapters.proxy.parsed import Route
from ragorder.adapters.proxy.upstream import UpstreamError, error_event
from ragorder.adapters.proxy.usage import StreamReader, reader_for

__all__ = ["HeldAnswer"]

# A longer beginning is sent on, with or without a token in it.
_MOST_BYTES = 1 << 16
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_TRY_ELSEWHERE = (502, 503)


class HeldAnswer:
    """ASGI send that holds an answer until its first token (`of_tokens`), or the end if it is not a stream; other
    answers until their first chunk. `route` gives the protocol of errors.

    If another replica is available (`refusable`), a 502 or 503 raises UpstreamError instead, unless it has Retry-After:
    then all other replicas are in backoff as well."""

    def __init__(
        self,
        send: Send,
        *,
        of_tokens: bool,
        refusable: bool,
        on_begun: Callable[[], None] = lambda: None,
        route: Route | None = None,
    ) -> None:
        self.begun = False
        self._send = send
        self._of_tokens = of_tokens
        self._refusable = refusable
        self._on_begun = on_begun
        self._route = route
        self._head: Message | None = None
        # One buffer: a server may send single bytes.
        self._held = bytearray()
        self._is_compressed = False
        self._stream: StreamReader | None = None
        self._between_events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._read_head(message)
            self._head = message
            return
        chunk: bytes = message.get("body", b"")
        self._between_events = chunk.endswith(_EVENT_ENDS) if chunk else self._between_events
        if self.begun:
            await self._send(message)
            return
        self._held += chunk
        if not message.get("more_body", False) or len(self._held) > _MOST_BYTES or not self._waits(chunk):
            await self._begin(message)

    async def fail(self, error: HTTPError) -> None:
        """Tell the client of an event stream that has begun; the connection is cut off afterwards."""
        if self.begun and self._stream is not None and self._between_events:
            event = error_event(self._route, error)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _read_head(self, message: Any) -> None:
        status, headers = message["status"], message["headers"]
        retry_after = (header(headers, b"retry-after") or b"").decode("latin-1")
        if self._refusable and status in _TRY_ELSEWHERE and requested_backoff_s(status, retry_after) is None:
            raise UpstreamError(status, "The upstream server does not take requests.", code="upstream_unavailable")
        self._is_compressed = (header(headers, b"content-encoding") or b"identity").lower() != b"identity"
        reader = reader_for(headers)
        self._stream = reader if isinstance(reader, StreamReader) else None

    def _waits(self, chunk: bytes) -> bool:
        if not self._of_tokens or self._is_compressed:
            return False
        if self._stream is None:
            return True
        self._stream.feed(chunk)
        return not self._stream.served

    async def _begin(self, last: Message) -> None:
        self.begun = True
        self._on_begun()
        body, self._held = bytes(self._held), bytearray()
        if self._head is not None:
            await self._send(self._head)
        await self._send({**last, "body": body})
