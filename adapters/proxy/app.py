"""The proxy as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from ragorder.adapters.proxy.answering import AnswerErrors
from ragorder.adapters.proxy.auth import RequireKey
from ragorder.adapters.proxy.forward import Forward
from ragorder.adapters.proxy.lengths import Lengths
from ragorder.adapters.proxy.openapi import describe
from ragorder.adapters.proxy.ordering import BodyOrderer
from ragorder.adapters.proxy.template import DocumentTemplate
from ragorder.adapters.proxy.turns import Turns
from ragorder.adapters.proxy.upstream import Timeouts, Upstream
from ragorder.orderer import Orders
from ragorder.prompt import PromptBuilder

__all__ = ["BODY_LIMIT", "make_app"]

BODY_LIMIT = 32 << 20
_HEALTH = "/ragorder/health"


def make_app(
    orderer: Orders,
    *,
    upstream: str,
    builder: PromptBuilder | None = None,
    tokenizer: Any = None,
    template: DocumentTemplate | None = None,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    body_limit: int = BODY_LIMIT,
    timeouts: Timeouts = Timeouts(),  # noqa: B008
    turns: Turns | None = None,
    send_facts: bool = False,
    routes: Sequence[BaseRoute] = (),
    make_transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> ASGIApp:
    """The proxy in front of the OpenAI-compatible server at `upstream` (with or without /v1).

    - Tagged documents and their question become one message by the templates of `builder`, which has no system prompt:
      that is in the request's messages. `tokenizer` (transformers) is the served model's, if it is known, and then the
      builder's as well.
    - `template` finds documents in messages that are not tagged.
    - `api_key` is asked of every request but GET /ragorder/health; `upstream_api_key` is sent upstream.
    - `turns` lets so many requests through to the server at a time; the others wait (None: it gets all at once).
    - `send_facts`: the server is a vLLM with ragorder tiers, and is told where the documents end (with `tokenizer`) and
      whose they are (a digest).
    - `body_limit` is in bytes. `routes` are the proxy's own, besides /ragorder/health and /ragorder/openapi.json.
    - `make_transport` replaces the connections to the upstream server.

    Raises ValueError for a builder with a system prompt, AddressError for an upstream or its key that is none.
    """
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
    bodies = BodyOrderer(orderer, builder, lengths, template, send_facts=send_facts)
    forward = Forward(server, bodies, body_limit=body_limit, in_thread=lengths.exact, turns=turns)
    description = describe()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(description)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await server.aclose()

    own = [Route(_HEALTH, health), Route("/ragorder/openapi.json", openapi)]
    app: ASGIApp = Router([*own, *routes], redirect_slashes=False, default=forward, lifespan=lifespan)
    if api_key is not None:
        app = RequireKey(app, api_key, open_paths=frozenset({_HEALTH}))
    return AnswerErrors(app)
