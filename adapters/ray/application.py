"""Ray Serve application of engines and an ingress."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.proxy.app import make_app
from ragorder.adapters.ray.replica import EngineReplica
from ragorder.adapters.ray.transport import ReplicaTransport
from ragorder.common.degraded import DegradedWarning
from ragorder.common.extras import install_hint
from ragorder.errors import RagorderError
from ragorder.orderer import Orderer
from ragorder.topic import Topics

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    from ragorder.kernels.engine_settings import EngineSettings
    from ragorder.settings import Settings

SUPPORTED_RAY = "2.60"
CONTRACT: dict[str, tuple[str, ...]] = {
    "ray.exceptions:RayError": (),
    "ray.exceptions:RayTaskError": (),
    "ray.exceptions:TaskCancelledError": (),
    "ray.serve:deployment": ("name", "max_ongoing_requests", "request_router_config"),
    "ray.serve.config:RequestRouterConfig": ("request_router_class", "request_router_kwargs"),
    "ray.serve.exceptions:BackPressureError": (),
    "ray.serve.exceptions:DeploymentUnavailableError": (),
    "ray.serve.exceptions:ReplicaUnavailableError": (),
    "ray.serve.exceptions:RequestCancelledError": (),
    "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter": (),
    "ray.serve.handle:DeploymentHandle.options": ("method_name", "session_id", "stream"),
    "ray.serve.handle:DeploymentResponseGenerator.__anext__": (),
    "ray.serve.handle:DeploymentResponseGenerator.cancel": (),
}
"""Used names, as "module:name", with the parameters that are passed or received."""
BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Never resolved; nothing listens there.
_EMBEDDED, _REPLICAS = "http://embedded", "http://replicas"
_SESSION = "x-session-id"
# Above this, a topic's requests go to the next replica on the ring.
_MOST_IN_FLIGHT = 64
_MOST_AT_INGRESS = 4096


class AppResponse(Response):
    """Response by an ASGI application, which sees no route prefix."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix: str = scope.get("root_path", "").rstrip("/")
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or path.encode()
        if path.startswith(f"{prefix}/"):
            path = path.removeprefix(prefix)
        if raw.startswith(f"{prefix}/".encode()):
            raw = raw.removeprefix(prefix.encode())
        await self._app({**scope, "path": path, "raw_path": raw, "root_path": ""}, receive, send)


class TopicIngress:
    """Ingress that sends requests to their topic's replica. All its processes have the same `topics`."""

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


def make_application(
    make_engine: Callable[[], ASGIApp],
    *,
    topics: Topics | None = None,
    replicas: Mapping[str, Any] | None = None,
    ingress: Mapping[str, Any] | None = None,
    **proxy: Any,
) -> Application:
    """Return an application of Ray Serve with OpenAI's API.

        app = make_application(EmbeddedEngine("/models/llama"), replicas={"num_replicas": 4})
        serve.run(app, route_prefix="/")

    A request's topic is its session, which Ray's ConsistentHashRouter maps to a replica; the replica orders.

    - `make_engine`, which Ray pickles, makes each replica's application: `EmbeddedEngine`, or a function that returns
      the proxy's `make_app` for the replica's own server.
    - `topics`: across deployments they need a secret.
    - `replicas`, `ingress`: options of the two deployments. Above a replica's `max_ongoing_requests` (64) requests go
      to the next one.
    - `proxy`: options of the proxy's `make_app` that find documents or limit clients.

    Raises UnsupportedRayError, ValueError for a request router in `replicas`.
    """
    check_ray()
    options = dict(replicas or {})
    if "request_router_config" in options:
        raise ValueError("topics need Ray's ConsistentHashRouter: leave request_router_config out")
    router = RequestRouterConfig(request_router_class=BY_SESSION)
    options = {"name": "Engine", "max_ongoing_requests": _MOST_IN_FLIGHT, **options}
    engines = serve.deployment(request_router_config=router, **options)(EngineReplica).bind(make_engine)
    front = {"name": "Ingress", "max_ongoing_requests": _MOST_AT_INGRESS, **(ingress or {})}
    return serve.deployment(**front)(TopicIngress).bind(engines, topics or Topics(), proxy)


class UnsupportedRayError(RagorderError, RuntimeError): ...


def check_ray() -> None:
    """Raise UnsupportedRayError if used parts are missing; warn of an untested version."""
    installed = ray.__version__
    if missing := missing_parts():
        raise UnsupportedRayError(
            f"Ray {installed} lacks {', '.join(missing)}: {install_hint('ray')}, which brings Ray {SUPPORTED_RAY}.x"
        )
    if installed.rpartition(".")[0] != SUPPORTED_RAY:
        message = (
            f"ragorder is tested with Ray {SUPPORTED_RAY}.x, and Ray {installed} is installed: its request routers may "
            f"have changed; {install_hint('ray')} brings the tested one"
        )
        warnings.warn(message, DegradedWarning, stacklevel=3)


def missing_parts() -> list[str]:
    return [name for name, parameters in CONTRACT.items() if not _has(name, parameters)]


def _has(name: str, parameters: tuple[str, ...]) -> bool:
    module, _, path = name.partition(":")
    try:
        part: Any = import_module(module)
        for each in path.split("."):
            part = getattr(part, each)
    except (ImportError, AttributeError):
        return False
    if not parameters:
        return True
    taken = inspect.signature(part).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return takes_any or all(each in taken for each in parameters)


class EmbeddedEngine:
    """Maker of a replica's engine, with the model in `folder` and an orderer of its tiers.

    Sizes in `orderer` default to the engine's; `options` are the proxy's. In the replica this raises ImportError
    without torch, and the errors of `TieredEngine.load`.
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
