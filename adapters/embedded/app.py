"""The embedded engine as an OpenAI-compatible ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.adapters.embedded.metrics import EngineMetrics
from ragorder.adapters.embedded.responses import (
    DONE,
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    event,
)
from ragorder.adapters.embedded.translation import RequestTranslator, TranslatedRequest
from ragorder.adapters.embedded.worker import EngineStoppedError, EngineWorker, TooManyAtOnceError, TooManyWaitingError
from ragorder.adapters.http_server.content_encoding import check_encoding, encoding_of
from ragorder.adapters.http_server.errors import ErrorMiddleware, HTTPError
from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.http_server.request_body import MemoryBudget, RequestBody
from ragorder.kernels.engine import Completion, RequestRefusedError, ShortOfMemoryError, TieredEngine, Update

BODY_LIMIT = 32 << 20

T = TypeVar("T")

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_RETRY = [(b"retry-after", b"1")]


def make_engine_app(
    worker: EngineWorker, *, metrics: EngineMetrics | None = None, body_limit: int = BODY_LIMIT, web_pages: bool = False
) -> ASGIApp:
    """Return the application, without access control: put the proxy before it. With `web_pages`, pages of any origin
    may read its answers.

        app = make_engine_app(EngineWorker(TieredEngine.load("/models/llama")))
    """
    metrics = metrics or EngineMetrics(worker)
    registry = CollectorRegistry()
    registry.register(metrics)
    handlers = _Handlers(worker, metrics)
    name = worker.engine.model_name
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ragorder"}
    model |= {"root": name, "parent": None, "max_model_len": worker.engine.longest}

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_metrics(_: Request) -> Response:
        return Response(await run_in_threadpool(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    async def unknown(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPError(404, "The embedded engine has no such route.", code="not_found")

    routes = [
        Route("/v1/completions", BodyEndpoint(handlers.complete, body_limit), methods=["POST"]),
        Route("/v1/chat/completions", BodyEndpoint(handlers.chat, body_limit), methods=["POST"]),
        Route("/tokenize", BodyEndpoint(handlers.tokenize, body_limit), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", _health_of(worker)),
        Route("/metrics", show_metrics),
    ]
    app: ASGIApp = ErrorMiddleware(Router(routes, redirect_slashes=False, default=unknown))
    return CORSMiddleware(app, ["*"], ["*"], ["*"]) if web_pages else app


def hosted(app: ASGIApp, worker: EngineWorker, close: Callable[[], Awaitable[None]] | None = None) -> ASGIApp:
    """Return the proxy's application with the engine's health. After its shutdown calls `close`, closes the worker."""
    routes = [Route(path, _health_of(worker)) for path in ("/health", "/ragorder/health")]
    router = Router(routes, redirect_slashes=False, default=app)

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def end_first(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                if close is not None:
                    await close()
                await anyio.to_thread.run_sync(worker.close)
            await send(message)

        if scope["type"] == "lifespan":
            await app(scope, receive, end_first)
        else:
            await router(scope, receive, send)

    return run


def _health_of(worker: EngineWorker) -> Callable[[Request], Awaitable[Response]]:
    async def health(_: Request) -> Response:
        if worker.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse(_stopped(worker.failure).content, status_code=503)

    return health


class BodyEndpoint:
    """Endpoint that reads a body, in at most `client_s` seconds (see `RequestBody`), and ends with its client. Until
    then its bytes are part of `bodies`."""

    def __init__(
        self,
        answer: Callable[[bytes, Send], Awaitable[None]],
        body_limit: int,
        client_s: float | None = None,
        bodies: MemoryBudget | None = None,
    ) -> None:
        self._answer = answer
        self._body_limit = body_limit
        self._client_s = client_s
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        encoding = encoding_of(headers)
        if encoding is not None:
            check_encoding(encoding)
        with (self._bodies or MemoryBudget(self._body_limit)).share() as share:
            body = RequestBody(headers, receive, self._body_limit, share, self._client_s, encoding)
            async with body.connected():
                await self._answer(await body.read(), send)


def translator_of(engine: TieredEngine) -> RequestTranslator:
    """Return a translator with its own tokenizer: tokenizers are not thread-safe."""
    return RequestTranslator(
        deepcopy(engine.tokenizer),
        model_name=engine.model_name,
        longest=engine.longest,
        fusion=engine.settings.fusion,
    )


class _Handlers:
    def __init__(self, worker: EngineWorker, metrics: EngineMetrics) -> None:
        engine = worker.engine
        self._worker = worker
        self._metrics = metrics
        self._translator = translator_of(engine)
        self._single_thread = anyio.CapacityLimiter(1)

    async def complete(self, content: bytes, send: Send) -> None:
        translated = await self._run(partial(self._translator.completion, content))
        del content
        await self._generate(translated, CompletionResponseBuilder, send)

    async def chat(self, content: bytes, send: Send) -> None:
        translated = await self._run(partial(self._translator.chat, content))
        del content
        await self._generate(translated, ChatResponseBuilder, send)

    async def tokenize(self, content: bytes, send: Send) -> None:
        await send_json(await self._run(partial(self._translator.tokenize, content)), send)

    async def _run(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._single_thread)

    async def _generate(
        self, translated: TranslatedRequest[Any], make_builder: type[ResponseBuilder], send: Send
    ) -> None:
        builder = make_builder(self._worker.engine.model_name, self._translator.token_text)
        self._metrics.count(translated)
        with engine_errors():
            async with self._worker.submit(translated.requests) as updates:
                if translated.body.stream:
                    await self._stream(translated, builder, updates, send)
                else:
                    completions = await _completions(updates, len(translated.requests))
                    answer = partial(builder.complete, completions)
                    # Logprobs are up to 21 texts a token to decode. Without them there is no need for the thread.
                    slow = any(each.logprobs for each in completions)
                    await send_json(await self._run(answer) if slow else answer(), send)

    async def _stream(
        self,
        translated: TranslatedRequest[Any],
        builder: ResponseBuilder,
        updates: AsyncIterator[tuple[int, Update]],
        send: Send,
    ) -> None:
        """Send headers with the first token: earlier failures have their own status."""
        completions: list[Completion] = []
        begun = False
        try:
            async for place, update in updates:
                chunks = b"".join(map(event, builder.chunks(place, update)))
                if update.completion is not None:
                    completions.append(update.completion)
                if chunks and not begun:
                    await start_events(send)
                    begun = True
                if chunks:
                    await send({"type": "http.response.body", "body": chunks, "more_body": True})
        except (HTTPError, EngineStoppedError) as error:
            if not begun:
                raise
            failure = error if isinstance(error, HTTPError) else _stopped(str(error))
            await send({"type": "http.response.body", "body": event(failure.content)})
            return
        options = translated.body.stream_options
        usage = event(builder.last(completions)) if options is not None and options.include_usage else b""
        await send({"type": "http.response.body", "body": usage + DONE})


@contextmanager
def engine_errors() -> Iterator[None]:
    """Answer the engine's errors by status."""
    try:
        yield
    except ShortOfMemoryError as error:
        raise HTTPError(503, f"{error}.", code="short_of_memory", headers=_RETRY) from None
    except RequestRefusedError as error:
        raise HTTPError(400, f"The engine refuses this request: {error}", code="request_refused") from None
    except TooManyAtOnceError as error:
        raise HTTPError(400, f"prompt: {error}.", code="invalid_prompt", param="prompt") from None
    except TooManyWaitingError as error:
        raise HTTPError(503, f"{error}: try again later.", code="too_many_waiting", headers=_RETRY) from None
    except EngineStoppedError as error:
        raise _stopped(str(error)) from None


async def _completions(updates: AsyncIterator[tuple[int, Update]], count: int) -> Sequence[Completion]:
    completions = {place: update.completion async for place, update in updates if update.completion is not None}
    return [completions[place] for place in range(count)]


async def start_events(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})


async def send_json(content: Any, send: Send) -> None:
    body = msgspec.json.encode(content)
    headers = [*_JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _stopped(why: str) -> HTTPError:
    return HTTPError(503, f"The engine has stopped: {why}.", code="engine_stopped")
