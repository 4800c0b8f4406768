"""Proxy of several replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, without
from ragorder.adapters.http_server.memory import MemoryShare
from ragorder.adapters.http_server.request_body import RequestBody
from ragorder.adapters.proxy.fleet import Fleet, Replica, Tries
from ragorder.adapters.proxy.held_answer import HeldAnswer
from ragorder.adapters.proxy.ordering import SentRequest
from ragorder.adapters.proxy.parsing import BodyParser, ParsedBody
from ragorder.adapters.proxy.reverse_proxy import Head, ReverseProxy, forward_answer, pieces, with_length
from ragorder.adapters.proxy.stored_responses import StoredResponses
from ragorder.adapters.proxy.upstream import UpstreamError

__all__ = ["FleetProxy"]

_REPLICA = b"x-ragorder-replica"
_OF_TOKENS = ("chat", "completions", "messages", "responses")
_SAFE = ("GET", "HEAD", "OPTIONS")


class FleetProxy(ReverseProxy):
    """Proxy that forwards each request to a replica, and to another one if that fails before the answer begins.

    Chats, completions, other JSON below /v1/ and GETs are repeated; other requests may have had an effect and are
    repeated only if there was no connection. All tries of a request share `tries_s` seconds until the answer begins.
    Raises HTTPError."""

    def __init__(self, fleet: Fleet, parser: BodyParser, *, tries_s: float, **limits: Any) -> None:
        super().__init__(parser, **limits)
        self._fleet = fleet
        self._tries_s = tries_s
        self._stored = StoredResponses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._fleet.begin_checks()
        await super().__call__(scope, receive, send)

    async def _exchange(self, head: Head, request_body: RequestBody, send: Send, share: MemoryShare) -> None:
        admission = self._admission if head.is_queued else None
        if head.route is None and admission is None:
            await self._forward_stream(head, await request_body.stream(), send)
            return
        async with AsyncExitStack() as until_answered:
            # Kept until an answer has begun: another replica may need it.
            received = [await request_body.read()]
            parsed = await self._read(head, received, share)
            upcoming: Sequence[ParsedBody] = ()
            if admission is not None:
                predict = None if parsed is None else partial(self._fleet.predict_cached_tokens, parsed)
                upcoming = await until_answered.enter_async_context(admission.admit(parsed, predict))
            keeper = partial(self._keeper, head, received[0])
            only = await self._workers.run(keeper, len(received[0]) if head.route == "responses" else 0)
            tries = Tries(self._fleet, repeatable=head.is_queued, counted=head.is_queued, only=only)
            with self._limited(tries, self._tries_s) as limit:
                while not await self._answered(head, received, parsed, upcoming, send, share, tries, limit):
                    # Ordering has changed the parsed body.
                    parsed = await self._read(head, received, share)

    async def _read(self, head: Head, received: list[bytes], share: MemoryShare) -> ParsedBody | None:
        if head.route is None:
            return None
        body = received[0]
        parsed, kept = await self._workers.run(partial(self._parse, head.route, body), len(body))
        share.resize(kept)
        return parsed

    async def _answered(
        self,
        head: Head,
        received: list[bytes],
        parsed: ParsedBody | None,
        upcoming: Sequence[ParsedBody],
        send: Send,
        share: MemoryShare,
        tries: Tries,
        limit: anyio.CancelScope,
    ) -> bool:
        """Return False if the replica failed and another should be tried. Raises HTTPError."""
        length, of_tokens = len(received[0]), head.route in _OF_TOKENS
        # If the client disconnects meanwhile, the documents may be ordered only afterwards.
        place = partial(self._place, parsed, upcoming, tuple(tries.replicas), tries.only)
        replica, sent = await self._workers.run(place, length, abandoned=self._end)
        tries.begin(replica)

        def begin() -> None:
            limit.deadline = inf
            received.clear()
            share.resize(0)

        # Requests that are not repeated keep the replica's answer.
        answer = HeldAnswer(send, of_tokens=of_tokens, refusable=tries.refusable, on_begun=begin, route=head.route)
        try:
            body = sent.take_body(received[0])
            # Without documents it is the received body.
            share.resize(len(body) + (0 if body is received[0] else length))
            headers = sent.request_headers(with_length(head.headers, body))
            if head.route == "responses":
                # The answer's id is read to find the replica again.
                headers = [*without(headers, b"accept-encoding"), (b"accept-encoding", b"identity")]
            if of_tokens and replica.headers:
                headers = [*without(headers, replica.headers[0][0]), *replica.headers]
            content = pieces([body], share, kept=length)
            del body
            await self._forward(head, headers, content, tries, answer, sent)
            return True
        except UpstreamError as error:
            if tries.gives_up(error, begun=answer.begun):
                await answer.fail(error)
                raise
            return False
        finally:
            self._end((replica, sent))

    async def _forward_stream(self, head: Head, content: AsyncIterator[bytes] | None, send: Send) -> None:
        repeatable = content is None and head.method in _SAFE
        only = self._keeper(head)
        tries = Tries(self._fleet, repeatable=repeatable, counted=head.is_queued, only=only)
        # An upload may take as long as its client does.
        with self._limited(tries, inf if content is not None else self._tries_s) as limit:
            while not await self._streamed(head, content, send, tries, limit):
                pass

    async def _streamed(
        self,
        head: Head,
        content: AsyncIterator[bytes] | None,
        send: Send,
        tries: Tries,
        limit: anyio.CancelScope,
    ) -> bool:
        replica, sent = self._place(None, (), tries.replicas, tries.only)
        tries.begin(replica)

        def begin() -> None:
            limit.deadline = inf

        answer = HeldAnswer(send, of_tokens=False, refusable=tries.refusable, on_begun=begin)
        try:
            await self._forward(head, head.headers, content, tries, answer, sent)
            return True
        except UpstreamError as error:
            if tries.gives_up(error, begun=answer.begun):
                raise
            return False
        finally:
            self._end((replica, sent))

    @contextmanager
    def _limited(self, tries: Tries, seconds: float) -> Iterator[anyio.CancelScope]:
        """Limit all tries together until an answer begins. Raises HTTPError at the deadline."""
        with anyio.CancelScope(deadline=anyio.current_time() + seconds) as limit:
            yield limit
        if limit.cancelled_caught:
            if tries.replicas:
                tries.failed()
            tried = f"{len(tries.replicas)} of {len(self._fleet.replicas)} were tried"
            message = f"No replica has begun to answer within {seconds:g} s (--tries-timeout): {tried}."
            raise HTTPError(504, message, code="upstream_timeout")

    async def _forward(
        self,
        head: Head,
        headers: Headers,
        content: AsyncIterator[bytes] | None,
        tries: Tries,
        answer: HeldAnswer,
        sent: SentRequest,
    ) -> None:
        replica = tries.replicas[-1]
        async with replica.server.send(head.method, head.target, headers, content) as response:
            tries.answered(response.status_code, response.headers.get("retry-after", ""))
            raw = [*response.headers.raw, (_REPLICA, b"%d" % replica.number)]
            chunks = self._stored.read(response, replica) if head.route == "responses" else response.aiter_raw()
            await forward_answer(response.status_code, raw, chunks, answer, sent)

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
        """Return the replica that stores the named response, or None. If it takes no requests, another replica may
        share its store."""
        replica = self._stored.of_body(body) if head.route == "responses" else self._stored.of_target(head.target)
        return replica if replica is not None and replica.takes_requests else None

    def _end(self, placed: tuple[Replica, SentRequest]) -> None:
        replica, sent = placed
        sent.end()
        self._fleet.leave(replica)
