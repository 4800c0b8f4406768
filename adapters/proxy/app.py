"""The proxy as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from ragorder.adapters.http_server.errors import ErrorMiddleware, HTTPError
from ragorder.adapters.http_server.memory import MemoryBudget
from ragorder.adapters.proxy.access import APIKeyMiddleware, HostMiddleware
from ragorder.adapters.proxy.admission import AdmissionQueue
from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.parsing import BodyParser
from ragorder.adapters.proxy.reverse_proxy import ReverseProxy
from ragorder.adapters.proxy.schema import openapi
from ragorder.adapters.proxy.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.token_counter import TokenCounter
from ragorder.adapters.proxy.upstream import Timeouts, Upstream
from ragorder.adapters.proxy.workers import Workers
from ragorder.orderer import OrdererLike
from ragorder.prompt import PromptBuilder

__all__ = ["BODIES_LIMIT", "BODY_LIMIT", "PROBES", "make_app"]

BODY_LIMIT = 32 << 20
BODIES_LIMIT = 256 << 20
_HEALTH = "/ragorder/health"
_READY = "/ragorder/ready"
# Probes bring no key, and come from anywhere.
PROBES = frozenset({_HEALTH, _READY})

_READY_TIMEOUT_S = 2.0
_READY_CACHED_S = 1.0
# vLLM, SGLang and others have the first one; all have the second.
_READY_PATHS = (b"/health", b"/v1/models")
_NO_SUCH_PATH = (404, 405)


def make_app(
    orderer: OrdererLike,
    *,
    upstream: str,
    builder: PromptBuilder | None = None,
    tokenizer: Any = None,
    template: DocumentTemplate | None = None,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    hosts: Collection[str] | None = None,
    body_limit: int = BODY_LIMIT,
    bodies_limit: int = BODIES_LIMIT,
    timeouts: Timeouts = Timeouts(),  # noqa: B008
    admission: AdmissionQueue | None = None,
    send_facts: bool = False,
    number_by_place: bool = False,
    on_passed: Callable[[str], None] | None = None,
    on_tbt: Callable[[float], None] | None = None,
    routes: Sequence[BaseRoute] = (),
    make_transport: Callable[[], httpx2.AsyncBaseTransport] | None = None,
) -> ASGIApp:
    """The proxy in front of the OpenAI-compatible server at `upstream` (with or without /v1).

    - `builder` renders tagged documents and their question; it has no system prompt.
    - `tokenizer` (transformers): the served model's, and the builder's.
    - `template` finds documents in messages that are not tagged.
    - `api_key` is required of clients, `upstream_api_key` sent upstream. Without a key, only `hosts` may be addressed.
    - `send_facts`: a vLLM with ragorder tiers gets the ends of documents (with `tokenizer`) and a digest of the tenant.
    - `number_by_place`: a document's id in the prompt is the number of its place.
    - `on_passed` gets the reason for each request forwarded without documents.
    - `on_tbt` gets the mean seconds between the tokens of each streamed answer to a request with documents.
    - `body_limit` (each) and `bodies_limit` (all together) are in bytes.
    - `routes` are served besides the proxy's own; `make_transport` replaces the connections upstream.

    Raises ValueError for a builder with a system prompt, AddressError for a malformed address or key, TemplateError for
    numbers by place without an id.

        app = make_app(Orderer(capacity_tokens=100_000), upstream="http://127.0.0.1:8000")
    """
    if number_by_place and template is not None and not template.shows_id:
        raise TemplateError("numbers by place need {id} in the template")
    builder = builder or PromptBuilder("", tokenizer=tokenizer)
    if builder.system:
        raise ValueError("the proxy's prompt builder has no system prompt, the requests have: PromptBuilder('')")
    tokens = TokenCounter(builder, tokenizer)
    server = Upstream(
        upstream,
        api_key=upstream_api_key,
        forwards_authorization=api_key is None,
        timeouts=timeouts,
        make_transport=make_transport,
    )
    workers = Workers(always=tokens.exact)
    proxy = ReverseProxy(
        server,
        BodyParser(
            builder,
            tokens,
            template,
            warn=orderer.degrade,
            send_facts=send_facts,
            number_by_place=number_by_place,
            on_passed=on_passed,
        ),
        RequestOrderer(orderer, send_facts=send_facts, exact=tokens.exact, on_tbt=on_tbt),
        body_limit=body_limit,
        memory=MemoryBudget(bodies_limit),
        workers=workers,
        client_s=timeouts.client_s,
        admission=admission,
    )
    description = openapi()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def show_openapi(_: Request) -> JSONResponse:
        return JSONResponse(description)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        workers.close()
        await server.aclose()

    own = [
        Route(_HEALTH, health),
        Route(_READY, _Readiness(server).answer),
        Route("/ragorder/openapi.json", show_openapi),
    ]
    app: ASGIApp = Router([*own, *routes], redirect_slashes=False, default=proxy, lifespan=lifespan)
    if api_key is not None:
        app = APIKeyMiddleware(app, api_key, open_paths=PROBES)
    elif hosts is not None:
        app = HostMiddleware(app, hosts, open_paths=PROBES)
    return ErrorMiddleware(app)


class _Readiness:
    """Queries the upstream server for at most two seconds, and once a second."""

    def __init__(self, server: Upstream) -> None:
        self._server = server
        self._checking = asyncio.Lock()
        self._checked_at = -_READY_CACHED_S
        self._ready = False

    async def answer(self, _: Request) -> JSONResponse:
        async with self._checking:
            if time.monotonic() - self._checked_at >= _READY_CACHED_S:
                self._ready = await self._answers()
                self._checked_at = time.monotonic()
        if self._ready:
            return JSONResponse({"status": "ready"})
        error = HTTPError(
            503, "The upstream server does not answer, or answers with an error.", code="upstream_not_ready"
        )
        return JSONResponse(error.content, status_code=error.status)

    async def _answers(self) -> bool:
        status = 0
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                for path in _READY_PATHS:
                    async with self._server.send("GET", path, [], None) as response:
                        status = response.status_code
                    if status not in _NO_SUCH_PATH:
                        break
        except (HTTPError, TimeoutError):
            return False
        return status < 500
