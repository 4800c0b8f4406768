"""The proxy as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from ragorder.adapters.http_server.room import Room
from ragorder.adapters.proxy.answering import AnswerErrors
from ragorder.adapters.proxy.auth import RequireKey
from ragorder.adapters.proxy.forward import Forward
from ragorder.adapters.proxy.hosts import RequireHost
from ragorder.adapters.proxy.lengths import Lengths
from ragorder.adapters.proxy.openapi import describe
from ragorder.adapters.proxy.ordering import BodyOrderer
from ragorder.adapters.proxy.ready import Ready
from ragorder.adapters.proxy.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.turns import Turns
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
    turns: Turns | None = None,
    send_facts: bool = False,
    number_by_place: bool = False,
    on_passed: Callable[[str], None] | None = None,
    routes: Sequence[BaseRoute] = (),
    make_transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> ASGIApp:
    """The proxy in front of the OpenAI-compatible server at `upstream` (with or without /v1).

    - Tagged documents and their question become one message by the templates of `builder`, which has no system prompt:
      that is in the request's messages. `tokenizer` (transformers) is the served model's, if it is known, and then the
      builder's as well.
    - `template` finds documents in messages that are not tagged.
    - `api_key` is asked of every request but GET /ragorder/health and /ragorder/ready; `upstream_api_key` is sent
      upstream. Without a key, `hosts` are the only names by which the proxy may be called, and whose web pages may call
      it (None: all).
    - `turns` lets so many requests through to the server at a time; the others wait (None: it gets all at once).
    - `send_facts`: the server is a vLLM with ragorder tiers, and is told where the documents end (with `tokenizer`) and
      whose they are (a digest).
    - `number_by_place`: a document shows as its id the number of its place in the prompt, from 1, whatever id it has.
      The answer's header x-ragorder-permutation says which document that is.
    - `on_passed` is told of each request that goes on without documents, and why: "no_documents", "one_document",
      "other_route" or "unreadable".
    - `body_limit` is in bytes, `bodies_limit` is that of all bodies together. `routes` are the proxy's own, besides
      /ragorder/health, /ragorder/ready and /ragorder/openapi.json.
    - `make_transport` replaces the connections to the upstream server.

    Raises ValueError for a builder with a system prompt, AddressError for an upstream or its key that is none,
    TemplateError for numbers by place in documents that show no id.
    """
    if number_by_place and template is not None and not template.shows_id:
        raise TemplateError("numbers by place need {id} in the template")
    builder = builder or PromptBuilder("", tokenizer=tokenizer)
    if builder.system:
        raise ValueError("the proxy's prompt builder has no system prompt, the requests have: PromptBuilder('')")
    lengths = Lengths(builder, tokenizer)
    server = Upstream(
        upstream,
        api_key=upstream_api_key,
        forwards_authorization=api_key is None,
        timeouts=timeouts,
        make_transport=make_transport,
    )
    bodies = BodyOrderer(
        orderer,
        builder,
        lengths,
        template,
        send_facts=send_facts,
        number_by_place=number_by_place,
        on_passed=on_passed,
    )
    workers = Workers(always=lengths.exact)
    forward = Forward(
        server,
        bodies,
        body_limit=body_limit,
        room=Room(bodies_limit),
        workers=workers,
        patience_s=timeouts.client_s,
        turns=turns,
    )
    description = describe()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(description)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        workers.close()
        await server.aclose()

    own = [Route(_HEALTH, health), Route(_READY, Ready(server).answer), Route("/ragorder/openapi.json", openapi)]
    app: ASGIApp = Router([*own, *routes], redirect_slashes=False, default=forward, lifespan=lifespan)
    if api_key is not None:
        app = RequireKey(app, api_key, open_paths=PROBES)
    elif hosts is not None:
        app = RequireHost(app, hosts, open_paths=PROBES)
    return AnswerErrors(app)
