"""Ray Serve application of engines and an ingress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from ragorder.adapters.ray.ingress import TopicIngress
from ragorder.adapters.ray.replica import EngineReplica
from ragorder.adapters.ray.versions import check_ray
from ragorder.topic import Topics

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["make_application"]

_BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Above this, a topic's requests go to the next replica on the ring.
_MOST_IN_FLIGHT = 64
_MOST_AT_INGRESS = 4096


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
    - `topics` are the same in all processes of the ingress; across deployments they need a secret.
    - `replicas` and `ingress` are options of the two deployments. Above `max_ongoing_requests` (64) of a replica its
      requests go to the next one.
    - `proxy`: options of the proxy's `make_app` that find documents or limit clients (`template`, `api_key`, …).

    Raises UnsupportedRayError for a Ray that lacks used parts, ValueError for a request router in `replicas`.
    """
    check_ray()
    options = dict(replicas or {})
    if "request_router_config" in options:
        raise ValueError("topics need Ray's ConsistentHashRouter: leave request_router_config out")
    router = RequestRouterConfig(request_router_class=_BY_SESSION)
    options = {"name": "Engine", "max_ongoing_requests": _MOST_IN_FLIGHT, **options}
    engines = serve.deployment(request_router_config=router, **options)(EngineReplica).bind(make_engine)
    front = {"name": "Ingress", "max_ongoing_requests": _MOST_AT_INGRESS, **(ingress or {})}
    return serve.deployment(**front)(TopicIngress).bind(engines, topics or Topics(), proxy)
