"""The proxy as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from ragorder.adapters.http_server.errors import ErrorMiddleware
from ragorder.adapters.http_server.request_body import MemoryBudget
from ragorder.adapters.proxy.access import AccessMiddleware, host_check, key_check
from ragorder.adapters.proxy.admission import AdmissionQueue
from ragorder.adapters.proxy.bodies.parsing import BodyParser, PromptLearner
from ragorder.adapters.proxy.bodies.presets import PromptRecogniser
from ragorder.adapters.proxy.bodies.schema import openapi
from ragorder.adapters.proxy.bodies.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.adapters.proxy.bodies.turns import RepeatedDocuments
from ragorder.adapters.proxy.fleet import Fleet
from ragorder.adapters.proxy.fleet_proxy import FleetProxy
from ragorder.adapters.proxy.ordering import OnSent, RequestOrderer, TopicRouter
from ragorder.adapters.proxy.pages import readiness, replica_routes, served
from ragorder.adapters.proxy.reverse_proxy import Limits, ReverseProxy, ServerProxy
from ragorder.adapters.proxy.upstream import Timeouts, Upstream, error_content
from ragorder.adapters.proxy.workers import Workers
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike
from ragorder.topic import checked_header

if TYPE_CHECKING:
    from ragorder.adapters.cloud_orderers import CloudOrderers

BODY_LIMIT = 32 << 20
BODIES_LIMIT = 256 << 20
_HEALTH = "/ragorder/health"
_READY = "/ragorder/ready"
# Probes have no key and any host.
PROBES = frozenset({_HEALTH, _READY})


def make_app(
    orderer: OrdererLike,
    *,
    upstream: str | Fleet,
    builder: PromptBuilder | None = None,
    tokenizer: Any = None,
    template: DocumentTemplate | Sequence[DocumentTemplate] | None = None,
    finds_native: bool = True,
    stable_tools: bool = False,
    on_recognised: Callable[[str, int, int, int], None] | None = None,
    learner: PromptLearner | None = None,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    hosts: Collection[str] | None = None,
    body_limit: int = BODY_LIMIT,
    bodies_limit: int = BODIES_LIMIT,
    timeouts: Timeouts = Timeouts(),  # noqa: B008
    admission: AdmissionQueue | None = None,
    send_facts: bool = False,
    number_by_place: bool = False,
    repeated: RepeatedDocuments | None = None,
    marks: bool | None = None,
    clouds: CloudOrderers | None = None,
    topic_header: str | None = None,
    route: bool = False,
    on_passed: Callable[[str], None] | None = None,
    on_tbt: Callable[[float], None] | None = None,
    on_sent: OnSent | None = None,
    routes: Sequence[BaseRoute] = (),
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    make_transport: Callable[[], httpx2.AsyncBaseTransport] | None = None,
) -> ASGIApp:
    """Return the proxy of the OpenAI- or Anthropic-compatible server at `upstream` (with or without /v1), or of a
    fleet, whose replicas have their own orderers: `orderer` then only gets warnings.

        app = make_app(Orderer(capacity_tokens=100_000), upstream="http://127.0.0.1:8000")

    - `builder` renders tagged documents and their question.
    - `tokenizer` (transformers): the served model's, and the builder's.
    - `template` finds documents in untagged messages; of several, the first that does.
    - `finds_native`: order documents in the APIs' own fields and blocks, and translate citations.
    - `stable_tools`: sort tools by name, also without documents.
    - `on_recognised`: see `PromptRecogniser` (None: no presets); `learner` gets requests in which none finds documents.
    - `api_key` is required of clients; without it only `hosts` may be addressed.
    - `send_facts`: send document ends (with `tokenizer`) and the tenant's digest to a vLLM with ragorder tiers.
    - `number_by_place`: ids that number ranks from 1 become positions.
    - `repeated` names documents of earlier messages instead of sending them again.
    - `marks`: set breakpoints after the documents in /v1/messages; the orderer then takes `feedback=False`. A client's
      own breakpoints keep the documents' order, unless `marks` is False: then the cache finds any common prefix.
    - `clouds`: order for these models by their cache's rules, and set breakpoints unless the client does: in OpenAI's
      chats and responses, and with `marks` in /v1/messages.
    - `topic_header` carries the documents' topic; with `route` nothing is ordered.
    - `on_passed` gets the reason for each request that is not ordered, `on_tbt` the mean seconds between tokens of each
      streamed answer on documents, `on_sent` each sent order (`SharedOrderer.share`).
    - `body_limit` (each) and `bodies_limit` (all together) are in bytes.
    - `background` tasks must not raise; `make_transport` replaces connections upstream.

    Raises ValueError for a builder with a system prompt, an invalid header, and `route` without a header or with a
    fleet; AddressError for a malformed address or key; TemplateError for `number_by_place` with a template that shows
    neither id nor number, or with `repeated`."""
    templates = [template] if isinstance(template, DocumentTemplate) else template or []
    if number_by_place and not all(each.shows_id or each.shows_number for each in templates):
        raise TemplateError("numbering by position needs {id} in the template")
    if number_by_place and repeated is not None:
        raise TemplateError("a position number names no document of another message: leave out one option")
    builder = builder or PromptBuilder("", tokenizer=tokenizer)
    if builder.system:
        raise ValueError("the builder has a system prompt, but requests bring their own: give PromptBuilder('')")
    if route and isinstance(upstream, Fleet):
        raise ValueError("a fleet chooses the replica itself: leave out route")
    if topic_header is not None:
        checked_header(topic_header)
    elif route:
        raise ValueError("route needs a topic header: give topic_header='x-session-id'")
    tokens = TokenCounter(builder, tokenizer)

    def server_at(address: str) -> Upstream:
        return Upstream(
            address,
            api_key=upstream_api_key,
            forwards_authorization=api_key is None,
            timeouts=timeouts,
            make_transport=make_transport,
        )

    def ordering(by: OrdererLike) -> RequestOrderer:
        return RequestOrderer(
            by,
            send_facts=send_facts,
            exact=tokens.exact,
            on_tbt=on_tbt,
            on_sent=on_sent,
            topic_header=topic_header,
        )

    workers = Workers(always=tokens.exact)
    parser = BodyParser(
        builder,
        tokens,
        templates,
        warn=orderer.degrade,
        finds_native=finds_native,
        stable_tools=stable_tools,
        recogniser=None if on_recognised is None or route else PromptRecogniser(orderer.settings, on_recognised),
        learner=learner,
        send_facts=send_facts,
        number_by_place=number_by_place,
        repeated=repeated,
        marks=["messages"] if marks else [],
        clouds=clouds,
        heeds_client_marks=marks is not False and not route,
        on_passed=on_passed,
    )
    limits = Limits(body_limit, MemoryBudget(bodies_limit), workers, timeouts.client_s, admission)
    about = {
        "template": ", ".join(each.form for each in templates) or None,
        "lengths": "counted" if tokens.exact else "estimated",
    }
    own = [Route(_HEALTH, health), Route("/ragorder/openapi.json", show_openapi)]
    proxy: ReverseProxy
    if isinstance(upstream, Fleet):
        upstream.connect(server_at, ordering)
        proxy = FleetProxy(upstream, parser, limits, tries_s=timeouts.all_tries_s)
        servers = [each.server for each in upstream.replicas]
        own += [Route(_READY, readiness(upstream.check)), *replica_routes(upstream)]
        close = upstream.aclose
    else:
        server = server_at(upstream)
        servers = [server]
        orders = TopicRouter(orderer, topic_header) if route else ordering(orderer)
        proxy = ServerProxy(server, parser, orders, limits)
        own += [Route(_READY, readiness(server.answers))]
        close = server.aclose
    own += [Route("/ragorder/served", served(servers, about))]

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with anyio.create_task_group() as running:
            for run in background:
                running.start_soon(run)
            yield
            running.cancel_scope.cancel()
        workers.close()
        await close()

    app: ASGIApp = Router([*own, *routes], redirect_slashes=False, default=proxy, lifespan=lifespan)
    if api_key is not None:
        app = AccessMiddleware(app, key_check(api_key), open_paths=PROBES)
    elif hosts is not None:
        app = AccessMiddleware(app, host_check(hosts), open_paths=PROBES)
    return ErrorMiddleware(app, error_content)


async def health(_: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def show_openapi(_: Request) -> JSONResponse:
    return JSONResponse(openapi())
