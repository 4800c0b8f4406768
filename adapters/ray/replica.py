"""An engine with its cache's orderer, as a replica of a deployment."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, cast

import httpx2
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.http_server.app_transport import AppTransport
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, header, is_json
from ragorder.adapters.proxy.fleet_proxy import HeldAnswer
from ragorder.adapters.ray.lifespan import Lifespan

__all__ = ["EngineReplica", "ReplicaRequest"]

_OF_TOKENS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_REPLICA = b"x-ragorder-replica"
_READY = b"/ragorder/ready"
# Nothing listens there.
_HERE = "http://replica"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class ReplicaRequest(NamedTuple):
    """An HTTP request on its way through Ray. `target` is path and query, header names are in lower case."""

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
        """The topic, or the client's own session."""
        named = header(self.headers, b"x-session-id")
        return named.decode("latin-1") if named else None


class EngineReplica:
    """Replica that answers requests by the ASGI application that `make_engine` makes in this process.

    Chats and completions yield no item before their first token, whole ones none before their end: until then a caller
    may send the request to another replica.
    """

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
        """Raises RuntimeError if the engine does not take requests: Ray then replaces the replica."""
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
        """End the application. Ray calls it when the replica is drained."""
        await self._lifespan.end()


def _held(app: ASGIApp) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in _OF_TOKENS:
            send = HeldAnswer(send, of_tokens=True, refusable=False)
        await app(scope, receive, send)

    return answer
