"""Proxy of several replicas."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any
from urllib.parse import unquote

import anyio
import httpx2
from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from ragorder.adapters.http_server.content_encoding import encoding_of
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, header, without
from ragorder.adapters.proxy.bodies.body import Route, decode
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.fleet import Fleet, Replica, Tries, requested_backoff_s
from ragorder.adapters.proxy.kept_body import KeptBody
from ragorder.adapters.proxy.ordering import SentRequest
from ragorder.adapters.proxy.reverse_proxy import Head, Limits, ReverseProxy, forward_answer, with_length
from ragorder.adapters.proxy.upstream import UpstreamError, error_event
from ragorder.adapters.proxy.usage import EventLines, StreamReader, reader_for
from ragorder.adapters.structs import readable_by_threads
from ragorder.common.lru_cache import LRUCache

# A longer beginning is sent on, with or without a token in it.
_MOST_BYTES = 1 << 16
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_TRY_ELSEWHERE = (502, 503)


class HeldAnswer:
    """ASGI send that holds an answer `of_tokens` until its first token, or its end if it is no stream; other answers
    until their first chunk. `route` is the protocol of errors. If another replica is available (`refusable`), a 502 or
    503 without Retry-After raises UpstreamError; with it all others are in backoff, too."""

    def __init__(
        self,
        send: Send,
        *,
        of_tokens: bool,
        refusable: bool,
        on_begun: Callable[[], None] = lambda: None,
        on_ended: Callable[[], None] = lambda: None,
        route: Route | None = None,
    ) -> None:
        self.begun = False
        self._send = send
        self._of_tokens = of_tokens
        self._refusable = refusable
        self._on_begun = on_begun
        self._on_ended = on_ended
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
        if is_last := not message.get("more_body", False):
            # Before the client sees the end: it may send the next request at once.
            self._on_ended()
        chunk: bytes = message.get("body", b"")
        self._between_events = chunk.endswith(_EVENT_ENDS) if chunk else self._between_events
        if self.begun:
            await self._send(message)
            return
        self._held += chunk
        if is_last or len(self._held) > _MOST_BYTES or not self._waits(chunk):
            await self._begin(message)

    async def fail(self, error: HTTPError) -> None:
        """Tell the client of a begun event stream, before its connection is cut off."""
        if self.begun and self._stream is not None and self._between_events:
            event = error_event(self._route, error)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _read_head(self, message: Any) -> None:
        status, headers = message["status"], message["headers"]
        retry_after = (header(headers, b"retry-after") or b"").decode("latin-1")
        if self._refusable and status in _TRY_ELSEWHERE and requested_backoff_s(status, retry_after) is None:
            raise UpstreamError(status, "The upstream server does not take requests.", code="upstream_unavailable")
        self._is_compressed = encoding_of(headers) is not None
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


_REMEMBERED = 1 << 16
# Longer answers, and longer beginnings of streams, are not read.
_MOST_STORED_BYTES = 1 << 22
_MOST_EVENTS_BYTES = 1 << 16
# On all routes of responses.
_OF_ONE = re.compile(r"/+(?:openai/+)?(?:v1/+|deployments/+[^/]+/+)?responses/+([^/]+)")
_LONGEST_ID = 512


@readable_by_threads
class _Response(Struct):
    id: str


@readable_by_threads
class _Event(Struct):
    response: _Response


@readable_by_threads
class _Body(Struct):
    previous_response_id: str


class StoredResponses:
    """Replicas of the last 65,536 responses: only its own can continue, show, cancel or delete a response."""

    def __init__(self) -> None:
        self._replicas: LRUCache[Replica] = LRUCache(_REMEMBERED)

    def of_body(self, content: bytes) -> Replica | None:
        body = decode(content, _Body) if b"previous_response_id" in content else None
        return None if body is None else self._replicas.get(body.previous_response_id)

    def of_target(self, target: bytes) -> Replica | None:
        named = _OF_ONE.match(unquote(target.partition(b"?")[0]))
        return None if named is None else self._replicas.get(named[1])

    async def read(self, response: httpx2.Response, replica: Replica) -> AsyncIterator[bytes]:
        """Yield the answer; note its id before its end."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_read = 200 <= response.status_code < 300
        lines = EventLines() if kind == "text/event-stream" else None
        length, whole = 0, bytearray()
        async for chunk in response.aiter_raw():
            length += len(chunk)
            is_read = is_read and length <= (_MOST_STORED_BYTES if lines is None else _MOST_EVENTS_BYTES)
            if not is_read:
                whole.clear()
            elif lines is None:
                whole += chunk
            else:
                found = next(filter(None, map(_id_of_event, list(lines.feed(chunk)))), None)
                is_read = not self._remember(found, replica)
            yield chunk
        if is_read and lines is None:
            answer = decode(bytes(whole), _Response)
            self._remember(None if answer is None else answer.id, replica)

    def _remember(self, id: str | None, replica: Replica) -> bool:
        if id is not None and len(id) <= _LONGEST_ID:
            self._replicas.put(id, replica)
        return id is not None


def _id_of_event(line: bytes | None) -> str | None:
    event = decode(line[5:], _Event) if line is not None and line.startswith(b"data:") else None
    return None if event is None else event.response.id


_REPLICA = b"x-ragorder-replica"
_OF_TOKENS = ("chat", "cohere", "completions", "messages", "responses")
_SAFE = ("GET", "HEAD", "OPTIONS")


class FleetProxy(ReverseProxy):
    """Forwards each request to a replica, and to another if that fails before the answer begins.

    Chats, completions, other JSON below /v1/ and GETs are repeated; others, which may have had an effect, only if there
    was no connection. All tries together have `tries_s` seconds until an answer begins."""

    def __init__(self, fleet: Fleet, parser: BodyParser, limits: Limits, *, tries_s: float) -> None:
        super().__init__(parser, limits, fleet.predict_cached_tokens)
        self._fleet = fleet
        self._tries_s = tries_s
        self._stored = StoredResponses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._fleet.begin_checks()
        await super().__call__(scope, receive, send)

    async def _forward(self, head: Head, content: AsyncIterator[bytes] | None, send: Send) -> None:
        repeatable = content is None and head.method in _SAFE
        tries = Tries(self._fleet, repeatable=repeatable, counted=head.is_queued, only=self._keeper(head))
        # An upload may take as long as its client does.
        with self._limited(tries, inf if content is not None else self._tries_s) as limit:
            answered = False
            while not answered:
                placed = self._place(None, (), tries.replicas, tries.only)
                answered = await self._tried(head, placed, content, send, tries, limit)

    async def _answer(self, head: Head, body: KeptBody, send: Send) -> None:
        length = len(body.received) if head.route == "responses" else 0
        only = await self._run(partial(self._keeper, head, body.received), length)
        tries = Tries(self._fleet, repeatable=head.is_queued, counted=head.is_queued, only=only)
        with self._limited(tries, self._tries_s) as limit:
            while not await self._tried(head, await self._order(head, body, tries), body, send, tries, limit):
                await body.parse(self._parser, head.route, self._limits.workers)

    async def _order(self, head: Head, body: KeptBody, tries: Tries) -> tuple[Replica, SentRequest]:
        # If the client disconnects meanwhile, the documents may be ordered only afterwards.
        place = partial(self._place, body.parsed, self._upcoming(head), tuple(tries.replicas), tries.only)
        return await self._run(place, len(body.received), abandoned=self._end)

    async def _tried(
        self,
        head: Head,
        placed: tuple[Replica, SentRequest],
        body: KeptBody | AsyncIterator[bytes] | None,
        send: Send,
        tries: Tries,
        limit: anyio.CancelScope,
    ) -> bool:
        """Return False if another replica should be tried. Raises HTTPError."""
        replica, sent = placed
        tries.begin(replica)

        def begin() -> None:
            limit.deadline = inf
            if isinstance(body, KeptBody):
                body.free()

        # Requests that are not repeated keep the replica's answer.
        of_tokens = head.route in _OF_TOKENS
        answer = HeldAnswer(
            send,
            of_tokens=of_tokens,
            refusable=tries.refusable,
            on_begun=begin,
            on_ended=tries.ended,
            route=head.route,
        )
        try:
            headers, content = _request_to(replica, head, sent, body)
            async with replica.server.send(head.method, head.target, headers, content) as response:
                tries.answered(response.status_code, response.headers.get("retry-after", ""))
                raw = [*response.headers.raw, (_REPLICA, b"%d" % replica.number)]
                chunks = self._stored.read(response, replica) if head.route == "responses" else response.aiter_raw()
                await forward_answer(response.status_code, raw, chunks, answer, sent)
            return True
        except UpstreamError as error:
            if tries.gives_up(error, begun=answer.begun):
                if head.route is not None:
                    await answer.fail(error)
                raise
            return False
        finally:
            if answer.begun:
                tries.ended()
            self._end(placed)

    @contextmanager
    def _limited(self, tries: Tries, seconds: float) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope(deadline=anyio.current_time() + seconds) as limit:
            yield limit
        if limit.cancelled_caught:
            if tries.replicas:
                tries.failed()
            tried = f"{len(tries.replicas)} of {len(self._fleet.replicas)} were tried"
            message = f"No replica has begun to answer within {seconds:g} s (--tries-timeout): {tried}."
            raise HTTPError(504, message, code="upstream_timeout")

    def _place(
        self,
        parsed: ParsedBody | None,
        upcoming: Sequence[ParsedBody],
        tried: Sequence[Replica],
        only: Replica | None,
    ) -> tuple[Replica, SentRequest]:
        replica = self._fleet.take(parsed, tried, only)
        if replica is None:
            message = "No replica takes requests: all are draining (/ragorder/replicas)."
            raise HTTPError(503, message, code="no_replica", headers=[(b"retry-after", b"1")])
        try:
            return replica, SentRequest() if parsed is None else replica.orderer.order(parsed, upcoming)
        except BaseException:
            self._fleet.leave(replica)
            raise

    def _keeper(self, head: Head, body: bytes = b"") -> Replica | None:
        """If a response's replica takes no requests, another may share its store."""
        replica = self._stored.of_body(body) if head.route == "responses" else self._stored.of_target(head.target)
        return replica if replica is not None and replica.takes_requests else None

    def _end(self, placed: tuple[Replica, SentRequest]) -> None:
        replica, sent = placed
        sent.end()
        self._fleet.leave(replica)


def _request_to(
    replica: Replica, head: Head, sent: SentRequest, body: KeptBody | AsyncIterator[bytes] | None
) -> tuple[Headers, AsyncIterator[bytes] | None]:
    if not isinstance(body, KeptBody):
        return head.headers, body
    # Kept until an answer has begun: another replica may need it.
    length, content = body.send(sent.take_body(body.received), again=True)
    headers = sent.request_headers(with_length(head.headers, length))
    if head.route == "responses":
        # The answer's id is read to find the replica again.
        headers = [*without(headers, b"accept-encoding"), (b"accept-encoding", b"identity")]
    if head.route in _OF_TOKENS and replica.headers:
        headers = [*without(headers, replica.headers[0][0]), *replica.headers]
    return headers, content
