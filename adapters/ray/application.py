"""Ray Serve application of engines and an ingress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.proxy.app import make_app
from ragorder.adapters.ray.replica import EngineReplica
from ragorder.adapters.ray.transport import ReplicaTransport
from ragorder.adapters.ray.versions import check_ray
from ragorder.orderer import Orderer
from ragorder.topic import Topics

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    from ragorder.kernels.engine_settings import EngineSettings
    from ragorder.settings import Settings

__all__ = ["BY_SESSION", "AppResponse", "EmbeddedEngine", "TopicIngress", "make_application"]

BY_SESSION = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
)
"""The `request_router_config` that sends requests with the same `x-session-id` to the same replica."""

# Never resolved; nothing listens there.
_EMBEDDED, _REPLICAS = "http://embedded", "http://replicas"
_SESSION = "x-session-id"
# Above this, a topic's requests go to the next replica on the ring.
_MOST_IN_FLIGHT = 64
_MOST_AT_INGRESS = 4096


class EmbeddedEngine:
    """Maker of an engine with the model in `folder` and an orderer of its tiers, in each replica.

        app = make_application(EmbeddedEngine("/models/llama", EngineSettings(device_tokens=65_536)))

    `orderer` has the settings of its orderer (default: the engine's sizes), `options` are the proxy's. In the replica
    it raises ImportError without torch, and the errors of `TieredEngine.load`.
    """

    def __init__(
        self,
        folder: str,
        settings: EngineSettings | None = None,
        *,
        orderer: Settings | None = None,
        max_unfinished: int = 1024,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.orderer = orderer
        self.max_unfinished = max_unfinished
        self.options = options

    def __call__(self) -> ASGIApp:
        # A driver that only deploys needs no torch.
        from ragorder.adapters.embedded import AppTransport, EngineWorker, hosted, make_engine_app, with_sizes
        from ragorder.kernels.engine import TieredEngine

        worker = EngineWorker(TieredEngine.load(self.folder, self.settings), max_unfinished=self.max_unfinished)
        engine = make_engine_app(worker)
        proxy = make_app(
            Orderer(with_sizes(self.orderer or Orderer().settings, worker)),
            upstream=_EMBEDDED,
            tokenizer=deepcopy(worker.engine.tokenizer),
            send_facts=True,
            make_transport=lambda: AppTransport(engine),
            **self.options,
        )
        return hosted(proxy, worker)


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
            upstream=_REPLICAS,
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


def make_application(
    make_engine: Callable[[], ASGIApp],
    *,
    topics: Topics | None = None,
    replicas: Mapping[str, Any] | None = None,
    ingress: Mapping[str, Any] | None = None,
    **proxy: Any,
) -> Application:
    """Return an application of Ray Serve with OpenAI's API, for `serve.run`.

        app = make_application(EmbeddedEngine("/models/llama"), replicas={"num_replicas": 4})
        serve.run(app, route_prefix="/")

    A request's topic is its session, which Ray's ConsistentHashRouter maps to a replica; the replica orders.

    - `make_engine` makes, in each replica, an ASGI application with OpenAI's API: `EmbeddedEngine`, or a function that
      returns the proxy's `make_app` for the replica's own server. Ray pickles it.
    - `topics`: across deployments they need a secret.
    - `replicas`, `ingress`: options of the two deployments. Above `max_ongoing_requests` (64) of a replica its requests
      go to the next one.
    - `proxy`: options of the proxy's `make_app` that find documents or limit clients.

    Raises UnsupportedRayError for a Ray that lacks used parts, ValueError for a request router in `replicas`.
    """
    check_ray()
    options = dict(replicas or {})
    if "request_router_config" in options:
        raise ValueError("topics need Ray's ConsistentHashRouter: leave request_router_config out")
    options = {"name": "Engine", "max_ongoing_requests": _MOST_IN_FLIGHT, **options}
    engines = serve.deployment(request_router_config=BY_SESSION, **options)(EngineReplica).bind(make_engine)
    front = {"name": "Ingress", "max_ongoing_requests": _MOST_AT_INGRESS, **(ingress or {})}
    return serve.deployment(**front)(TopicIngress).bind(engines, topics or Topics(), proxy)
