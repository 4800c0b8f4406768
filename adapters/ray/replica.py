"""Replica of a Ray Serve deployment: an engine's ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, cast

import httpx2
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.adapters.http_server.app_transport import AppTransport
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, header, is_json
from ragorder.adapters.proxy.fleet_proxy import HeldAnswer

_OF_TOKENS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_REPLICA = b"x-ragorder-replica"
_READY = b"/ragorder/ready"
# Never resolved: requests go to the application in this process.
_HERE = "http://replica"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Lifespan:
    """Starts and ends an ASGI application in one event loop. Repeated calls have no effect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._given: asyncio.Queue[Message] = asyncio.Queue()
        self._answered: asyncio.Queue[Message] = asyncio.Queue()

        self._run: asyncio.Task[None] | None = None
        self._start: asyncio.Task[asyncio.Task[None]] | None = None

    async def begin(self) -> None:
        """Raises RuntimeError if the application cannot start; the next call tries again."""
        if self._start is None or (self._start.done() and (self._start.cancelled() or self._start.exception())):
            self._start = asyncio.ensure_future(self._begun())
        # If this request is cancelled, the start goes on for the next one.
        self._run = await asyncio.shield(self._start)

    async def end(self) -> None:
        if self._run is not None and not self._run.done():
            await self._ask("lifespan.shutdown", self._run)

    async def _begun(self) -> asyncio.Task[None]:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        run = asyncio.ensure_future(self._quietly(scope))
        answer = await self._ask("lifespan.startup", run)
        if answer is not None and answer["type"] == "lifespan.startup.failed":
            raise RuntimeError("the engine's application cannot start")
        return run

    async def _ask(self, what: str, run: asyncio.Task[None]) -> Message | None:
        self._given.put_nowait({"type": what})
        answer = asyncio.ensure_future(self._answered.get())
        await asyncio.wait([answer, run], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return None

    async def _quietly(self, scope: Message) -> None:
        try:
            await self._app(scope, self._given.get, self._answered.put)
        except Exception:
            # An application without lifespan support raises, but can serve requests.
            return


class ReplicaRequest(NamedTuple):
    """HTTP request to a replica. `target`: path and query; header names are in lower case."""

    method: str
    target: bytes
    headers: Headers
    body: bytes

    @property
    def repeatable(self) -> bool:
        has_no_effect = self.method == "POST" and self.target.startswith(b"/v1/") and is_json(self.headers)
        return has_no_effect or self.method in _SAFE

    @property
    def session(self) -> str | None:
        named = header(self.headers, b"x-session-id")
        return named.decode("latin-1") if named else None


class EngineReplica:
    """Replica that answers with an ASGI application. `answer` yields nothing of a chat or completion before its first
    token (not streamed: its end): until then the caller may try another replica."""

    def __init__(self, make_engine: Callable[[], ASGIApp]) -> None:
        app = make_engine()
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._lifespan = Lifespan(app)
        self._transport = AppTransport(_held(app))

    async def answer(self, request: ReplicaRequest) -> AsyncIterator[tuple[int, Headers] | bytes]:
        await self._lifespan.begin()
        try:
            response = await self._send(request)
        except httpx2.TransportError:
            error = HTTPError(502, "The engine of this replica broke off.", code="engine_failed")
            yield error.status, [(b"content-type", b"application/json")]
            yield json.dumps(error.content).encode()
            return
        try:
            yield response.status_code, [*response.headers.raw, (_REPLICA, self._name)]
            async for chunk in cast(httpx2.AsyncByteStream, response.stream):
                yield chunk
        finally:
            await response.aclose()

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine takes no requests: Ray then replaces the replica."""
        await self._lifespan.begin()
        response = await self._send(ReplicaRequest("GET", _READY, [], b""))
        await response.aclose()
        if response.status_code == 503:
            raise RuntimeError("the engine of this replica does not answer, or answers with an error")

    async def _send(self, request: ReplicaRequest) -> httpx2.Response:
        method, target, headers, body = request
        sent = httpx2.Request(method, _HERE, headers=headers, content=body, extensions={"target": target})
        return await self._transport.handle_async_request(sent)

    async def __del__(self) -> None:
        """Ray calls this before it ends the replica."""
        await self._lifespan.end()


def _held(app: ASGIApp) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in _OF_TOKENS:
            send = HeldAnswer(send, of_tokens=True, refusable=False)
        await app(scope, receive, send)

    return answer
