"""OpenAI's chat route for questions, whose documents the server retrieves (RAGDoll)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from secrets import randbits
from typing import Any

import anyio
import anyio.to_thread
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Send

from ragorder import Document, PromptBuilder
from ragorder.adapters.batching import BatchingMetrics, ordered_batches
from ragorder.adapters.embedded.app import BodyEndpoint, engine_errors, send_json, start_events
from ragorder.adapters.embedded.load import LoadFollower
from ragorder.adapters.embedded.protocol import ChatCompletionRequest
from ragorder.adapters.embedded.responses import DONE, event
from ragorder.adapters.embedded.streams import EmbeddedRequestError, EmbeddedStreams, EmbeddedTimeoutError
from ragorder.adapters.embedded.translation import RequestTranslator, TranslatedQuestion
from ragorder.adapters.embedded.worker import EngineWorker
from ragorder.adapters.http_server.errors import ErrorMiddleware, HTTPError
from ragorder.adapters.http_server.request_body import MemoryBudget
from ragorder.adapters.openai.prompts import PromptRequest, Question
from ragorder.pipelining import Usage
from ragorder.pipelining.batching import (
    BacklogAware,
    BatchedAnswer,
    BatchRetrieval,
    DecoupledServer,
    ServingPlacement,
)
from ragorder.pipelining.reordering import QueueFullError
from ragorder.protocols import OrdererLike

ANSWER_TOKENS = 256
"""Limit of an answer if the question sets none."""

_PATHS = ("/v1/chat/completions", "/chat/completions")
# A question is a text, not a prompt.
_BODY_LIMIT = 1 << 20
_BODIES_LIMIT = 64 << 20
_RETRY = [(b"retry-after", b"1")]

QuestionServer = DecoupledServer[Question, Document, PromptRequest]


def question_server(
    worker: EngineWorker,
    retrieval: BatchRetrieval[Question, Document],
    orderer: OrdererLike,
    builder: PromptBuilder,
    *,
    metrics: BatchingMetrics,
    placement: ServingPlacement | None = None,
    follower: LoadFollower | None = None,
    most: int | None = None,
) -> QuestionServer:
    """Return a server with two queues. Closing it leaves `worker`, `retrieval` and `follower` open.

    `most`: the most questions at once in any placement (default: of the engine now).
    """
    server: QuestionServer = ordered_batches(
        EmbeddedStreams(worker),
        retrieval,
        orderer=orderer,
        builder=builder,
        prompts="token_ids",
        observers=[metrics] if follower is None else [metrics, follower],
        batching=BacklogAware(most=most or worker.engine.settings.max_requests),
        kv_limit=worker.engine.device_tokens,
        max_requests=worker.max_unfinished,
        placement=placement,
    )
    if follower is not None:
        follower.follow(server)
    return server


def question_routes(
    server: QuestionServer,
    translator: RequestTranslator,
    *,
    model: str,
    client_s: float,
    deadline_s: float | None = None,
    web_pages: bool = False,
) -> list[Route]:
    """Return routes for an application with access control. See `make_engine_app`.

    `deadline_s` runs from a question's arrival, through both queues.
    """
    answer = _Questions(server, translator, model, deadline_s).answer
    endpoint = BodyEndpoint(answer, _BODY_LIMIT, client_s, MemoryBudget(_BODIES_LIMIT))
    app: ASGIApp = ErrorMiddleware(Router([Route(path, endpoint, methods=["POST"]) for path in _PATHS]))
    app = CORSMiddleware(app, ["*"], ["*"], ["*"]) if web_pages else app
    return [Route(path, app) for path in _PATHS]


class _Questions:
    def __init__(
        self, server: QuestionServer, translator: RequestTranslator, model: str, deadline_s: float | None
    ) -> None:
        self._server = server
        self._translator = translator
        self._model = model
        self._deadline_s = deadline_s
        self._single_thread = anyio.CapacityLimiter(1)

    async def answer(self, content: bytes, send: Send) -> None:
        arrived_s = asyncio.get_running_loop().time()
        translate = partial(self._translator.question, content, ANSWER_TOKENS)
        asked = await anyio.to_thread.run_sync(translate, limiter=self._single_thread)
        del content, translate
        question, response = _question_of(asked), _Response(self._model)
        if asked.body.stream:
            await self._stream(question, asked.body, response, arrived_s, send)
            return
        with _errors():
            async with self._in_time(arrived_s):
                answer = await self._server.run(question)
        await send_json(response.whole(answer), send)

    @asynccontextmanager
    async def _in_time(self, arrived_s: float) -> AsyncIterator[None]:
        until_s = None if self._deadline_s is None else arrived_s + self._deadline_s
        try:
            async with asyncio.timeout_at(until_s) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            why = f"the deadline of {self._deadline_s:g} s has passed: allow more, or ask for fewer tokens"
            raise EmbeddedTimeoutError(why) from None

    async def _stream(
        self, question: Question, body: ChatCompletionRequest, response: _Response, arrived_s: float, send: Send
    ) -> None:
        """Send headers with the first text: earlier failures have their own status."""
        begun = False

        async def push(*parts: Mapping[str, Any], last: bytes | None = None) -> None:
            nonlocal begun
            if not begun:
                await start_events(send)
                begun, parts = True, (response.opening(), *parts)
            await send(
                {
                    "type": "http.response.body",
                    "body": b"".join(map(event, parts)) + (last or b""),
                    "more_body": last is None,
                }
            )

        try:
            with _errors():
                async with self._in_time(arrived_s), self._server.stream(question) as stream:
                    async for text in stream:
                        await push(response.piece(text))
                answer = stream.answer
        except HTTPError as error:
            if not begun:
                raise
            await push(error.content, last=b"")
            return
        if answer is not None:
            options = body.stream_options
            usage = [response.usage(answer)] if options is not None and options.include_usage else []
            await push(response.end(answer), *usage, last=DONE)


class _Response:
    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answer: BatchedAnswer[Document]) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
        content = {"object": "chat.completion", "choices": [choice], "usage": _usage(answer.usage)}
        return self._head | content | {"documents": _shown(answer.documents)}

    def opening(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text})

    def end(self, answer: BatchedAnswer[Document]) -> dict[str, Any]:
        return self._chunk({}, _finish_reason(answer)) | {"documents": _shown(answer.documents)}

    def usage(self, answer: BatchedAnswer[Document]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": _usage(answer.usage)}

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}


def _question_of(asked: TranslatedQuestion) -> Question:
    sampling = asked.sampling
    options = {name: getattr(sampling, name) for name in ("top_p", "seed", "stop", "ignore_eos")}
    if options["seed"] is None:
        # An answer that is begun again after a shortage has the text that its client has.
        options["seed"] = randbits(63)
    return Question(asked.text, asked.salt, sampling.max_tokens, sampling.temperature, options)


@contextmanager
def _errors() -> Iterator[None]:
    with engine_errors():
        try:
            yield
        except QueueFullError as error:
            raise HTTPError(503, f"{error}.", code="too_many_waiting", headers=_RETRY) from None
        except EmbeddedTimeoutError as error:
            raise HTTPError(504, f"{error}.", code="deadline_exceeded") from None
        except MemoryError:
            raise HTTPError(503, "Memory is short: try again later.", code="short_of_memory", headers=_RETRY) from None
        except EmbeddedRequestError as error:
            if isinstance(error.__cause__, MemoryError):
                raise HTTPError(503, f"{error}.", code="short_of_memory", headers=_RETRY) from None
            raise HTTPError(500, f"{error}.", code="engine_error") from None
        except OSError:
            message = "The index could not be read: the server's disk fails, or the file has changed."
            raise HTTPError(500, message, code="index_failed") from None


def _finish_reason(answer: BatchedAnswer[Document]) -> str | None:
    return None if answer.usage is None else answer.usage.finish_reason


def _usage(usage: Usage | None) -> dict[str, Any]:
    prompt, completion = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage is not None else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": (usage.cached_tokens or 0) if usage is not None else 0},
    }


def _shown(documents: Sequence[Document]) -> list[dict[str, Any]]:
    return [{"id": each.id, "title": each.metadata.get("title", ""), "text": each.text} for each in documents]
