"""A request's path: read, parsed, admitted, ordered, forwarded, answered."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import methodcaller
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import Receive, Scope, Send

from ragorder.adapters.http_server.content_encoding import check_encoding, encoding_of, is_decodable
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, end_to_end, header, is_json, without
from ragorder.adapters.http_server.request_body import MemoryBudget, RequestBody
from ragorder.adapters.proxy.admission import AdmissionQueue
from ragorder.adapters.proxy.bodies.body import Route
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.kept_body import KeptBody
from ragorder.adapters.proxy.ordering import RequestOrderer, SentRequest, TopicRouter
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.adapters.proxy.workers import Workers
from ragorder.pipelining.reordering import CachedLengths

_ROUTES: dict[str, Route] = {
    "chat/completions": "chat",
    "completions": "completions",
    "messages": "messages",
    "responses": "responses",
    "v2/chat": "cohere",
}
# The servers' own names: LiteLLM and llama.cpp without /v1, Azure by deployment.
_ROUTE = re.compile(
    r"/(?:openai/)?(?:v1/|deployments/[^/]+/)?(chat/completions|completions|responses)|/v1/(messages)"
    r"|/(?:cohere/)?(v2/chat)"
)
_SLASHES = re.compile("/+")
_INVALID_IN_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SEPARATOR = re.compile(rb"[/\\]")
_DOTS = (b".", b"..")


class Head(NamedTuple):
    """The body is parsed if there is a `route`, after decoding from `encoding`; `is_sealed`: it would be, but its
    encoding is unknown."""

    method: str
    target: bytes
    headers: Headers
    route: Route | None
    is_queued: bool
    encoding: str | None = None
    is_sealed: bool = False


class Limits(NamedTuple):
    """`body`: most bytes of one; `client_s`: as in `Timeouts`."""

    body: int
    memory: MemoryBudget
    workers: Workers
    client_s: float
    admission: AdmissionQueue | None


class ReverseProxy(ABC):
    """ASGI application that forwards every HTTP request. JSON bodies of POSTs are parsed, and ordered if they have
    documents; other bodies and all answers are streamed. Raises HTTPError without an answer to forward."""

    def __init__(self, parser: BodyParser, limits: Limits, predict: Callable[[ParsedBody], CachedLengths]) -> None:
        self._parser = parser
        self._limits = limits
        self._predict = predict
        self._run = limits.workers.run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = read_head(scope)
        if head.is_sealed:
            self._parser.passed("compressed")
        limits, headers = self._limits, scope["headers"]
        admission = limits.admission if head.is_queued else None
        with limits.memory.share() as share:
            request_body = RequestBody(headers, receive, limits.body, share, limits.client_s, head.encoding)
            async with request_body.connected():
                if head.route is None and admission is None:
                    await self._forward(head, await request_body.stream(), send)
                    return
                body = KeptBody(await request_body.read(), share)
                await body.parse(self._parser, head.route, limits.workers)
                async with nullcontext() if admission is None else admission.admit(body.parsed, self._predict):
                    await self._answer(head, body, send)

    @abstractmethod
    async def _forward(self, head: Head, content: AsyncIterator[bytes] | None, send: Send) -> None:
        """Answer a request whose body is passed on as it arrives."""

    @abstractmethod
    async def _answer(self, head: Head, body: KeptBody, send: Send) -> None:
        """Order a request's documents, if it has any, and answer it."""

    def _upcoming(self, head: Head) -> Sequence[ParsedBody]:
        """Return the probably next requests, if this one was queued."""
        admission = self._limits.admission
        return admission.upcoming() if head.is_queued and admission is not None else ()


class ServerProxy(ReverseProxy):
    """Proxy of one server, whose cache `orderer` mirrors, or of a router."""

    def __init__(
        self, upstream: Upstream, parser: BodyParser, orderer: RequestOrderer | TopicRouter, limits: Limits
    ) -> None:
        super().__init__(parser, limits, orderer.predict_cached_tokens)
        self._upstream = upstream
        self._orderer = orderer

    async def _forward(self, head: Head, content: AsyncIterator[bytes] | None, send: Send) -> None:
        await self._exchange(head, head.headers, content, SentRequest(), send)

    async def _answer(self, head: Head, body: KeptBody, send: Send) -> None:
        sent = await self._order(head, body)
        try:
            length, content = body.send(sent.take_body(body.received))
            await self._exchange(head, sent.request_headers(with_length(head.headers, length)), content, sent, send)
        finally:
            # Before its admission ends, so that the choice of the next request sees this one's cached prefix.
            sent.end()

    async def _order(self, head: Head, body: KeptBody) -> SentRequest:
        if body.parsed is None:
            return SentRequest()
        # If the client disconnects meanwhile, the documents may be ordered only afterwards.
        order: Callable[[], SentRequest] = partial(self._orderer.order, body.parsed, self._upcoming(head))
        return await self._run(order, len(body.received), abandoned=methodcaller("end"))

    async def _exchange(
        self, head: Head, headers: Headers, content: AsyncIterator[bytes] | None, sent: SentRequest, send: Send
    ) -> None:
        async with self._upstream.send(head.method, head.target, headers, content) as response:
            await forward_answer(response.status_code, response.headers.raw, response.aiter_raw(), send, sent)


def read_head(scope: Scope) -> Head:
    """Raises HTTPError for a path that could leave the upstream address, or an encoding that may hide a tag."""
    headers: Headers = scope["headers"]
    is_post = scope["method"] == "POST"
    target, route = _target(scope), route_of(scope["path"]) if is_post else None
    is_queued = is_post and (route is not None or scope["path"].startswith("/v1/"))
    encoding, is_sealed = encoding_of(headers), False
    if route is not None and encoding is not None:
        check_encoding(encoding)
    elif route is None and is_post and is_json(headers):
        is_sealed = encoding is not None and not is_decodable(encoding)
        # Parsed only to refuse documents: this route would answer without them.
        route = None if is_sealed else "other"
    if route is None or encoding is None:
        return Head(scope["method"], target, headers, route, is_queued, None, is_sealed)
    return Head(scope["method"], target, without(headers, b"content-encoding"), route, is_queued, encoding)


def route_of(path: str) -> Route | None:
    """Return a path's protocol. Doubled and trailing slashes are ignored, as by some servers."""
    found = _ROUTE.fullmatch(_SLASHES.sub("/", path).rstrip("/"))
    return None if found is None else _ROUTES[next(filter(None, found.groups()))]


def with_length(headers: Headers, length: int) -> Headers:
    return [*without(headers, b"content-length"), (b"content-length", b"%d" % length)]


class ClientAnswer:
    def __init__(self, send: Send, sent: SentRequest) -> None:
        self._send = send
        self._sent = sent

    async def begin(self, status: int, headers: Headers) -> None:
        sent = self._sent
        sent.begin(status, headers)
        if sent.translator is not None and 200 <= status < 300:
            headers = sent.translator.begin(headers)
        else:
            sent.translator = None
        await self._send({"type": "http.response.start", "status": status, "headers": headers + sent.headers()})

    async def feed(self, chunk: bytes) -> None:
        sent = self._sent
        sent.feed(chunk)
        if sent.translator is not None:
            chunk = sent.translator.feed(chunk)
            if not chunk:
                return
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        sent = self._sent
        # Before the client sees the end: it may send the next request at once.
        sent.complete = True
        sent.end()
        last = b"" if sent.translator is None else sent.translator.end()
        await self._send({"type": "http.response.body", "body": last})


async def forward_answer(
    status: int, headers: Headers, chunks: AsyncIterator[bytes], send: Send, sent: SentRequest
) -> None:
    """Raises HTTPError for an answer that is not valid HTTP."""
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    headers = end_to_end(headers)
    if chunked:
        # With both lengths the chunked one counts (RFC 9112 6.3).
        headers = without(headers, b"content-length")
    if not 200 <= status < 600 or any(_INVALID_IN_HEADER.search(value) for _, value in headers):
        raise HTTPError(502, "The upstream server's answer is not valid HTTP.", code="upstream_unavailable")
    answer = ClientAnswer(send, sent)
    await answer.begin(status, headers)
    async for chunk in chunks:
        await answer.feed(chunk)
    await answer.end()


def _target(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"]
    if not path.startswith(b"/"):
        raise HTTPError(400, "The request's target is not a path: start it with /.", code="invalid_http")
    # Servers differ in their separators and in parameters of a segment.
    segments = _SEPARATOR.split(unquote_to_bytes(path))
    if any(segment.partition(b";")[0] in _DOTS for segment in segments):
        message = "The path must not have . or .. as a segment: send the resolved path."
        raise HTTPError(400, message, code="invalid_path")
    if (header(scope["headers"], b"upgrade") or b"").lower() == b"websocket":
        raise HTTPError(400, "WebSocket is not supported: use HTTP.", code="no_websocket")
    return path + b"?" + scope["query_string"] if scope["query_string"] else path
