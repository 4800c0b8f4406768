"""Ray Serve application of engines and an ingress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from ragorder.adapters.ray.best import BestIngress
from ragorder.adapters.ray.ingress import TopicIngress
from ragorder.adapters.ray.replica import EngineReplica
from ragorder.adapters.ray.versions import check_ray
from ragorder.orderer import Orderer, OrdererLike
from ragorder.topic import Topics

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["make_application"]

_BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_BY_CHOICE = "ragorder.adapters.ray.router.ChosenReplicaRouter"
# Above this, a topic's requests go to the next replica on the ring.
_MOST_IN_FLIGHT = 64
_MOST_AT_INGRESS = 4096


def make_application(
    make_engine: Callable[[], ASGIApp],
    *,
    choose: Literal["topic", "best"] = "topic",
    topics: Topics | None = None,
    make_orderer: Callable[[], OrdererLike] = Orderer,
    replicas: Mapping[str, Any] | None = None,
    ingress: Mapping[str, Any] | None = None,
    **proxy: Any,
) -> Application:
    """Return an application of Ray Serve with OpenAI's API, for `serve.run`.

        app = make_application(EmbeddedEngine("/models/llama"), replicas={"num_replicas": 4})
        serve.run(app, route_prefix="/")

    - `make_engine` makes, in each replica, an ASGI application with OpenAI's API: `EmbeddedEngine`, or a function that
      returns the proxy's `make_app` for the replica's own server. Ray pickles it.
    - `choose="topic"`: a request's topic is its session, which Ray's ConsistentHashRouter maps to a replica; the
      replica's orderer is in `make_engine`. `topics` are the same in all processes of the ingress; across deployments
      they need a secret.
    - `choose="best"`: the replica with the longest cached prefix of the request, less its load, by mirrors in the one
      process of the ingress, which also orders: `make_orderer` makes one for each replica, `make_engine` needs none.
    - `replicas` and `ingress` are options of the two deployments (`num_replicas`, `ray_actor_options`, …). Above
      `max_ongoing_requests` (64) of a replica its requests go to the next one.
    - `proxy`: options of the proxy's `make_app` that find documents or limit clients (`template`, `api_key`, `hosts`,
      `body_limit`, `timeouts`, …); with "best" also `tokenizer` and `send_facts`, which the embedded engine needs.

    Raises UnsupportedRayError for a Ray that lacks used parts, ValueError for contradictory options.
    """
    check_ray()
    if choose not in ("topic", "best"):
        raise ValueError(f"choose is {choose!r}: give 'topic' or 'best'")
    is_topic = choose == "topic"
    if not is_topic and topics is not None:
        raise ValueError("topics need choose='topic': leave one of the two out")
    options = dict(replicas or {})
    if "request_router_config" in options:
        raise ValueError(f"choose={choose!r} sets the request router: leave out request_router_config")
    front = dict(ingress or {})
    if not is_topic and front.keys() & {"num_replicas", "autoscaling_config"}:
        raise ValueError("choose='best' needs one process of the ingress, with all mirrors: leave num_replicas out")
    router = RequestRouterConfig(request_router_class=_BY_SESSION if is_topic else _BY_CHOICE)
    options = {"name": "Engine", "max_ongoing_requests": _MOST_IN_FLIGHT, **options}
    engines = serve.deployment(request_router_config=router, **options)(EngineReplica).bind(make_engine)
    given = topics or Topics() if is_topic else make_orderer
    front = {"name": "Ingress", "max_ongoing_requests": _MOST_AT_INGRESS, **front}
    return serve.deployment(**front)(TopicIngress if is_topic else BestIngress).bind(engines, given, proxy)
