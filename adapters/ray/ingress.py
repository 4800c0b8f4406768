"""Ingress deployment from HTTP to an engine's replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.proxy.app import make_app
from ragorder.adapters.ray.transport import ReplicaTransport
from ragorder.orderer import Orderer
from ragorder.topic import Topics

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["AppResponse", "TopicIngress"]

# Never resolved; nothing listens there.
_NOWHERE = "http://replicas"
_SESSION = "x-session-id"


class AppResponse(Response):
    """Response by an ASGI application, which sees the request without the route prefix."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(_below_prefix(scope), receive, send)


class TopicIngress:
    """Ingress that sends each request to its topic's replica; all its processes have the same `topics`."""

    def __init__(self, replicas: DeploymentHandle, topics: Topics, options: Mapping[str, Any]) -> None:
        self._app = make_app(
            Orderer(topics=topics),
            upstream=_NOWHERE,
            topic_header=_SESSION,
            route=True,
            make_transport=lambda: ReplicaTransport(replicas),
            **options,
        )

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self._app)


def _below_prefix(scope: Scope) -> Scope:
    prefix: str = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or path.encode()
    if prefix and path.startswith(prefix + "/"):
        path = path[len(prefix) :]
    if prefix and raw.startswith(prefix.encode() + b"/"):
        raw = raw[len(prefix.encode()) :]
    return {**scope, "path": path, "raw_path": raw, "root_path": ""}
