"""Ordering inside vLLM's own server, or another ASGI application."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import TomlConfigSettingsSource
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.adapters.http_server.errors import ErrorMiddleware, HTTPError
from ragorder.adapters.http_server.headers import header, is_json
from ragorder.adapters.learning.shadow import ShadowLearner
from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.proxy.app import BODY_LIMIT
from ragorder.adapters.proxy.bodies import schema
from ragorder.adapters.proxy.bodies.body import Route as Protocol
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.bodies.presets import NONE, PromptRecogniser, find_templates
from ragorder.adapters.proxy.bodies.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.ordering import RequestOrderer, SentRequest
from ragorder.adapters.proxy.pages import TEMPLATE_PATH, StatsPages
from ragorder.adapters.proxy.reverse_proxy import ClientAnswer, route_of, with_length
from ragorder.adapters.proxy.upstream import error_content
from ragorder.adapters.proxy.workers import Workers
from ragorder.adapters.vllm.own_engine import has_engine, own_engine
from ragorder.orderer import Orderer
from ragorder.settings import Settings

_FILE = "RAGORDER_CONFIG"
_TAG = b'"%s"' % schema.FIELD.encode()
_logger = logging.getLogger("ragorder")


class MiddlewareSettings(Settings):
    """Settings of `OrderDocuments`: arguments come first, then the environment (RAGORDER_TEMPLATE=auto), then the TOML
    file that RAGORDER_CONFIG names."""

    template: str | None = Field(
        None, description="How documents are found in messages that are not tagged: see --template of `ragorder serve`."
    )
    number_by_place: bool = Field(
        False, description="Replace ids that are retrieval ranks by places in the prompt: see --number-by-place."
    )
    stable_tools: bool = Field(False, description="Send tools in the order of their names: see --stable-tools.")
    shared_orders: str | None = Field(
        None, description="Valkey or Redis server by which several processes of one server share orders."
    )
    shadow: bool = Field(False, description="Serve retrieval order, and compute what ragorder's order would save.")
    body_limit: int = Field(BODY_LIMIT, ge=1, description="Longest body that is read for documents, in bytes.")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: Any, env_settings: Any, *_: Any, **__: Any
    ) -> tuple[Any, ...]:
        """Raises ValueError for a file that does not exist or is not TOML."""
        file = os.environ.get(_FILE)
        if file is None:
            return init_settings, env_settings
        if not Path(file).is_file():
            raise ValueError(f"{_FILE}: there is no file {file}")
        try:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)
        except ValueError as error:
            raise ValueError(f"{_FILE}: {file}: {error}") from None


class OrderDocuments:
    """ASGI middleware that orders documents for an application with OpenAI's, Anthropic's or Cohere's API: `ragorder
    serve` without its own process.

        vllm serve MODEL --middleware ragorder.adapters.vllm.OrderDocuments
        app.add_middleware(OrderDocuments, capacity_tokens=100_000)  # FastAPI, Starlette

    In vLLM's server block size, capacity and KV events are the engine's. `options` are fields of `MiddlewareSettings`.
    After an internal error a request is answered as it came, unless its documents would be lost. `/ragorder` shows the
    saving, `/ragorder/stats` as JSON, `/ragorder/metrics` for Prometheus. With invalid settings the server does not
    start; without its lifespan requests raise ValueError.
    """

    def __init__(self, app: ASGIApp, settings: MiddlewareSettings | None = None, **options: Any) -> None:
        self._app = app
        self._failure: ValueError | None = None
        self._templates: Sequence[DocumentTemplate] = ()
        try:
            self._settings = MiddlewareSettings(**options) if settings is None else settings
            self._templates = _templates_of(self._settings)
            # Errors of the orderer's settings, before the engine's sizes are known.
            _orderer_of(self._settings, self._settings).close()
        except ValueError as error:
            # Some servers go on if a layer cannot be made, and would fail each request.
            self._failure = error
        self._metrics = Metrics()
        self._learner: ShadowLearner | None = None
        learned = self._learned if self._learns else None
        pages = StatsPages(self._metrics, metrics_path="/ragorder/metrics", learned=learned)
        self._history = pages.history
        routes = [*pages.routes, Route("/ragorder/served", self._served)]
        self._pages = ErrorMiddleware(Router(routes, redirect_slashes=False))
        self._paths = frozenset(route.path for route in routes)
        self._workers = Workers()
        self._orderer: Orderer | None = None
        self._order: Callable[[Protocol, bytes], SentRequest | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with self._running():
                if self._failure is None:
                    if has_engine(scope):
                        # Later the first requests' KV events would be missed. An error is met again there, and logged.
                        with suppress(Exception):
                            await asyncio.to_thread(self._start, scope)
                    await self._app(scope, receive, send)
                else:
                    await receive()
                    await send(
                        {"type": "lifespan.startup.failed", "message": f"{type(self).__name__}: {self._failure}"}
                    )
            return
        if self._failure is not None:
            raise self._failure
        route: Protocol | None = None
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in self._paths:
                if self._learns and path == TEMPLATE_PATH and not await self._lists_models(scope, receive):
                    message = "The template has words of prompts: give the key with which the server lists its models."
                    await HTTPError(401, message, code="invalid_api_key").send(send)
                    return
                await self._pages(scope, receive, send)
                return
            # A server that reads an encoding hides the body from this layer.
            if scope["method"] == "POST" and header(scope["headers"], b"content-encoding") is None:
                # Other routes are parsed to refuse documents: they would be answered without them.
                route = route_of(path) or ("other" if is_json(scope["headers"]) else None)
        if route is None:
            await self._app(scope, receive, send)
        else:
            await self._exchange(route, scope, receive, send)

    async def _lists_models(self, scope: Scope, receive: Receive) -> bool:
        """Return whether the application, which checks keys after this layer, lists its models to the caller."""
        statuses: list[int] = []

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        path = scope.get("root_path", "") + "/v1/models"
        await self._app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, note)
        return statuses == [200]

    async def _exchange(self, route: Protocol, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return
        try:
            sent = await self._ordered(scope, route, body)
        except HTTPError as error:
            await error.send(send, error_content(scope["path"], error))
            return
        headers = scope["headers"]
        if sent is not None:
            body = sent.take_body(body)
            headers = with_length(sent.request_headers(headers), len(body))
        content: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def replay() -> Message:
            return content.pop() if content else await receive()

        if sent is None:
            await self._app(scope, replay, send)
            return
        answer = ClientAnswer(send, sent)

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                await answer.begin(message["status"], list(message.get("headers", ())))
            elif message["type"] == "http.response.body":
                if chunk := message.get("body", b""):
                    await answer.feed(chunk)
                if not message.get("more_body", False):
                    await answer.end()
            else:
                await send(message)

        try:
            await self._app({**scope, "headers": headers}, replay, answered)
        finally:
            sent.end()

    async def _ordered(self, scope: Scope, route: Protocol, body: bytes) -> SentRequest | None:
        """Return None for the request as it came. Raises HTTPError if its documents would be lost."""
        try:
            if len(body) > self._settings.body_limit:
                message = f"The body is longer than {self._settings.body_limit:,} bytes (RAGORDER_BODY_LIMIT)."
                raise HTTPError(413, message, code="body_too_large")
            order = self._order or self._start(scope)
            work = partial(order, route, body)
            return await self._workers.run(work, len(body), abandoned=methodcaller("end"))
        except HTTPError:
            if _TAG in body:
                raise
        except Exception as error:
            # An error's message may quote a prompt.
            _logger.error("a request is answered as it came: %s", type(error).__name__)
            if _TAG in body:
                message = "The documents could not be ordered: the server's log has the type of the error."
                raise HTTPError(500, message, code="ordering_failed") from None
        return None

    def _start(self, scope: Scope) -> Callable[[Protocol, bytes], SentRequest | None]:
        own = self._settings
        engine = own_engine(own, scope, shared_orders=own.shared_orders is not None)
        ordering: Any = engine.orderer() if own.shared_orders is None else _orderer_of(own, engine.settings)
        self._orderer = ordering
        orderer = ObservedOrderer(ordering, [self._metrics], shadow=own.shadow)
        for reason in engine.missing:
            orderer.degrade(reason)
        if engine.tokens.exact:
            self._workers = Workers(always=True)
        recognises = own.template != NONE
        if self._learns:
            self._learner = ShadowLearner.of(self._metrics, orderer)
        parser = BodyParser(
            engine.builder,
            engine.tokens,
            self._templates,
            warn=orderer.degrade,
            finds_native=recognises,
            stable_tools=own.stable_tools,
            recogniser=PromptRecogniser(engine.settings, self._metrics.recognised) if recognises else None,
            learner=self._learner,
            number_by_place=own.number_by_place,
            # Its cache finds any common prefix.
            heeds_client_marks=False,
            on_passed=self._metrics.passed,
        )
        on_sent = None if own.shared_orders is None or own.shadow else ordering.share
        requests = RequestOrderer(orderer, on_tbt=self._metrics.token_times, on_sent=on_sent)

        def order(route: Protocol, body: bytes) -> SentRequest | None:
            parsed = parser.parse(route, body)
            return None if parsed is None else requests.order(parsed)

        self._order = order
        return order

    @property
    def _learns(self) -> bool:
        return self._failure is None and self._settings.shadow and self._settings.template is None

    def _learned(self) -> str | None:
        return None if self._learner is None else self._learner.file()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._history.keep())
        try:
            yield
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            self._workers.close()
            if self._orderer is not None:
                self._orderer.close()

    async def _served(self, _: Request) -> JSONResponse:
        template = ", ".join(each.form for each in self._templates) or None
        lengths = "counted" if self._orderer is not None and self._orderer.events is not None else "estimated"
        about = {"servers": ["this one"], "models": [], "more_models": 0, "template": template, "lengths": lengths}
        return JSONResponse(about, headers={"Cache-Control": "no-store"})


async def _read(receive: Receive) -> bytes | None:
    """Return None if the client is gone. The application, too, would keep the whole body."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def _templates_of(own: MiddlewareSettings) -> list[DocumentTemplate]:
    try:
        templates = [] if own.template is None else find_templates(own.template)
    except TemplateError as error:
        raise ValueError(f"template (RAGORDER_TEMPLATE): {error}") from None
    if own.number_by_place and not all(each.shows_id or each.shows_number for each in templates):
        raise ValueError("number_by_place needs {id} or {n} in the template")
    return templates


def _orderer_of(own: MiddlewareSettings, settings: Settings) -> Any:
    """Raises ValueError for settings that do not fit."""
    if own.shared_orders is None:
        return Orderer(settings)
    from ragorder.adapters.shared_orders import SharedOrderer

    try:
        return SharedOrderer(own.shared_orders, settings, at_once=False)
    except ValueError:
        # The error itself may quote a password of the URL.
        raise ValueError("shared_orders: not a URL such as redis://127.0.0.1:6379/0") from None
