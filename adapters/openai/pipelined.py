"""Retrieval overlapped with prefill (RAGCache++ section 3.6, RAGCache section 5.3)."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, Self, TypeVar

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.endpoint import OpenAIStreams, checked_options
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question, checked_form, finish
from ragorder.adapters.vllm.cache_config import requests_on
from ragorder.common.running_mean import RunningMean
from ragorder.pipelining import (
    AnswerChunk,
    EngineLoad,
    Pipeline,
    PipelinedStream,
    Provisional,
    Retrieval,
    SpeculationGain,
    StreamingEngine,
    SyncPipeline,
    SyncStream,
    Usage,
    WarmUp,
    prefill_batch,
)
from ragorder.protocols import OrdererLike
from ragorder.scope.request import Lengths

__all__ = [
    "OpenAIStreams",
    "OrderedPrompts",
    "PipelinedClient",
    "PromptRequest",
    "Question",
    "SyncPipelinedClient",
    "SystemPrefix",
    "ordered_pipeline",
]

D = TypeVar("D")
Q = TypeVar("Q")
S = TypeVar("S", covariant=True)
A = TypeVar("A", covariant=True)

# Options that a chat template may read, or that route the request: a warm-up needs no others.
_TEMPLATE = ("tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_ROUTE = ("cache_salt", "extra_headers", "extra_query", "timeout", "user")
_MAX_SCOPES = 4096
_INTERVAL_S = 0.1
_LONGEST_INTERVAL_S = 60.0
_TIMEOUT_S = 2.0
_STALE_S = 1.0
# A server renders its metrics in the process that also sends the answers.
_MAX_SHARE = 0.05
QuestionRetrieval = Retrieval[Question, Document]
_logger = logging.getLogger("ragorder")


class WatchedEngine:
    def __init__(self, engine: StreamingEngine[PromptRequest]) -> None:
        self.running = 0
        self._engine = engine
        self._answered: set[Hashable] | None = None

    def trusted(self, scope: Hashable) -> bool:
        """Return False between a failure (perhaps a restart) and the next answer in this scope."""
        return self._answered is None or scope in self._answered

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        self.running += 1
        began = False
        try:
            async with aclosing(self._engine.stream(request)) as chunks:
                async for chunk in chunks:
                    if not began:
                        began = True
                        self._note_answer(request.scope)
                    yield chunk
        except Exception as error:
            if _is_loss(error):
                self._answered = set()
            raise
        finally:
            self.running -= 1

    async def prefill(
        self, request: PromptRequest, confirm: Callable[[Usage | None], None], discard: Callable[[], None]
    ) -> None:
        usage: Usage | None = None
        began = False
        try:
            async with aclosing(self.stream(request)) as chunks:
                async for chunk in chunks:
                    began = True
                    usage = chunk.usage or usage
        finally:
            if began:
                confirm(usage)
            else:
                discard()

    def _note_answer(self, scope: Hashable) -> None:
        if self._answered is not None:
            if len(self._answered) >= _MAX_SCOPES:
                # A removed scope costs one warm-up.
                self._answered.clear()
            self._answered.add(scope)


class SystemPrefix:
    """System prompt, prefilled once per scope; with `reuse="fused"` for each question, together with it.

        prefix = SystemPrefix(orderer, builder, engine)
        pipeline = Pipeline(retrieval, prompts, prefix.engine, warm_up=WarmUp(prefix))

    After a failure of its `engine` it counts as evicted. Raises ValueError for invalid `prompts`.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder,
        engine: StreamingEngine[PromptRequest],
        prompts: PromptForm = "messages",
    ) -> None:
        self.engine = engine if isinstance(engine, WatchedEngine) else WatchedEngine(engine)
        self._orderer = orderer
        self._builder = builder
        self._form = checked_form(prompts, builder)
        self._asks = orderer.settings.reuse == "fused" and len(builder.prefix_ids) > 0

    def scope(self, question: Question, /) -> Hashable:
        return (question.scope, question.query) if self._asks else question.scope

    def is_cached(self, question: Question, /) -> bool:
        """Return True also for a prefix shorter than a block, for which a warm-up is useless."""
        if self._asks:
            return False
        if self._builder.prefix_tokens < self._orderer.settings.block_size:
            return True
        return self._orderer.holds_prefix(scope=question.scope) and self.engine.trusted(question.scope)

    async def prefill(self, question: Question, /) -> None:
        """Raises the engine's errors; cancelling aborts the request."""
        request = self._request(question)
        lengths = Lengths(suffix=(request.prompt_tokens or 0) - self._builder.prefix_tokens)
        ordering: Ordering[Document] = self._orderer.order([], scope=question.scope, lengths=lengths)
        ordered_s = time.perf_counter()
        await self.engine.prefill(request, lambda usage: finish(ordering, usage, ordered_s), ordering.discard)

    def _request(self, question: Question) -> PromptRequest:
        options = _shaping(question.options)
        if body := question.options.get("extra_body"):
            options["extra_body"] = _shaping(body)
        options |= {"max_tokens": 1, "temperature": 0.0}
        builder, query = self._builder, question.query if self._asks else ""
        prompt, front = builder.build(query, ()), builder.prefix_tokens
        length = front + builder.suffix_tokens(query)
        # The system prompt is its own node on the embedded engine: no node has a prompt's last token.
        ends = (front,) if prompt.token_ids is not None else ()
        if self._form == "token_ids":
            messages, token_ids, prefix_tokens = None, prompt.token_ids, front
        else:
            messages, token_ids, prefix_tokens = prompt.messages, None, 0
        return PromptRequest(
            messages, token_ids, question.scope, options, length, ends, (), prefix_tokens, keep_question=self._asks
        )


def _shaping(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _TEMPLATE + _ROUTE}


def _is_loss(error: Exception) -> bool:
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and status < 500
    return not (refused or isinstance(error, (ValueError, TypeError)))


class PromptLoad(EngineLoad):
    """Load of a shared engine."""

    def __init__(
        self,
        engine: WatchedEngine,
        *,
        max_prefill_bs: int | None = None,
        token_budget: int = 8192,
        requests: Callable[[], int | None] | None = None,
    ) -> None:
        def reported() -> int | None:
            count = requests() if requests is not None else None
            return None if count is None else self._pending + max(0, count - engine.running)

        super().__init__(1 if max_prefill_bs is None else max_prefill_bs, reported)
        self._token_budget = token_budget if max_prefill_bs is None else None
        self._mean = RunningMean()

    def learn(self, prompt_tokens: int) -> None:
        if self._token_budget is not None:
            self._mean.add(prompt_tokens)
            self.max_prefill_bs = prefill_batch(self._token_budget, round(self._mean.value or 0))


class MetricsPoll:
    """Number of requests on a vLLM server, polled from /metrics during searches; None without a recent answer."""

    def __init__(self, client: Any, engine: WatchedEngine) -> None:
        self._client = client
        self._engine = engine
        self._url = re.sub(r"/v1/?$", "", str(client.base_url)).rstrip("/") + "/metrics"
        self._searches = 0
        self._others: int | None = None
        self._answered_s = 0.0
        self._interval_s = _INTERVAL_S
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def __call__(self) -> int | None:
        if self._others is None or time.monotonic() - self._answered_s > max(_STALE_S, 2 * self._interval_s):
            return None
        # Our own requests change between two polls.
        return self._others + self._engine.running

    def during(self, retrieval: Retrieval[Q, D]) -> Retrieval[Q, D]:
        async def search(question: Q) -> AsyncGenerator[Provisional[D], None]:
            self._searches += 1
            try:
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._poll())
                async with aclosing(retrieval(question)) as stages:
                    async for stage in stages:
                        yield stage
            finally:
                self._searches -= 1

        return search

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _poll(self) -> None:
        while self._searches:
            if time.monotonic() >= self._next_s:
                await self._poll_once()
                self._next_s = time.monotonic() + self._interval_s
            await asyncio.sleep(_INTERVAL_S)

    async def _poll_once(self) -> None:
        sent_s, ours = time.monotonic(), self._engine.running
        try:
            page = await self._client.get(self._url, cast_to=str, options={"timeout": _TIMEOUT_S, "max_retries": 0})
            present = requests_on(page)
            if present is None:
                raise LookupError("no such metrics")
        except Exception as error:
            self._others = None
            self._interval_s = min(2 * self._interval_s, _LONGEST_INTERVAL_S)
            _logger.debug("the server's load is unknown: %s", type(error).__name__)
        else:
            self._others, self._answered_s = max(0, present - max(ours, self._engine.running)), time.monotonic()
            self._interval_s = max(_INTERVAL_S, (self._answered_s - sent_s) / _MAX_SHARE)


class _ClosingPipeline(Pipeline[Question, Document, PromptRequest]):
    ends: Sequence[Callable[[], Awaitable[None]]] = ()

    async def close(self) -> None:
        await super().close()
        for end in self.ends:
            await end()


def ordered_pipeline(
    engine: StreamingEngine[PromptRequest],
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    retrieval: QuestionRetrieval,
    prompts: PromptForm = "token_ids",
    warm_up: bool = True,
    speculate: bool = True,
    cautious: bool = True,
    max_prefill_bs: int | None = None,
    token_budget: int = 8192,
    requests: Callable[[], int | None] | None = None,
    ends: Sequence[Callable[[], Awaitable[None]]] = (),
) -> Pipeline[Question, Document, PromptRequest]:
    """Return a pipeline that orders its documents, on `OpenAIStreams`, or on `AsyncVLLM` with its `requests`.

    - `warm_up`: prefill an uncached system prompt during retrieval.
    - `speculate`: generate on provisional documents while fewer than `max_prefill_bs` requests wait for their first
      token (None: how many mean prompts an iteration of `token_budget` tokens has); if `cautious`, only where recent
      searches predict a gain.
    - `requests()`: all clients' requests on the engine (None: unknown). `ends` are awaited on closing.

    Raises ValueError for invalid `prompts` and a `max_prefill_bs` below 1.
    """
    prefix = SystemPrefix(orderer, builder, engine, prompts)
    load = PromptLoad(prefix.engine, max_prefill_bs=max_prefill_bs, token_budget=token_budget, requests=requests)
    if warm_up and orderer.settings.prefix_tokens == 0 and builder.prefix_tokens >= orderer.settings.block_size:
        _logger.warning("no warm-up: the orderer has no system prompt: give it the builder's prefix_tokens")
    pipeline = _ClosingPipeline(
        retrieval,
        OrderedPrompts(orderer, builder, prompts, learn=load.learn),
        prefix.engine,
        warm_up=WarmUp(prefix) if warm_up else None,
        load=load if speculate else None,
        gain=SpeculationGain() if cautious else None,
    )
    pipeline.ends = ends
    return pipeline


class _PipelineLike(Protocol[S, A]):
    def stream(self, question: Question) -> S: ...
    def answer(self, question: Question) -> A: ...


class _BasePipelinedClient(Generic[S, A]):
    _runner: _PipelineLike[S, A]

    def __init__(
        self,
        client: Any,
        *,
        model: str,
        retrieval: QuestionRetrieval,
        prompts: PromptForm = "messages",
        speculate: bool = True,
        report_load: bool = True,
        send_salt: bool = True,
        send_facts: bool = False,
        **options: Any,
    ) -> None:
        engine = WatchedEngine(OpenAIStreams(client, model, send_salt=send_salt, send_facts=send_facts))
        poll = MetricsPoll(client, engine) if speculate and report_load else None
        self._client = client
        self._send_salt = send_salt
        self._ends: list[Callable[[], Awaitable[None]]] = [] if poll is None else [poll.close]
        searched = retrieval if poll is None else poll.during(retrieval)
        parts: dict[str, Any] = {"retrieval": searched, "requests": poll, "ends": self._ends}
        self._pipeline = ordered_pipeline(engine, prompts=prompts, speculate=speculate, **parts, **options)

    def stream(self, query: str, *, scope: Hashable = None, **options: Any) -> S:
        """Stream the answer; closing it ends retrieval and requests. Options and errors as for
        `OrderedClient.generate`, and retrieval's errors."""
        return self._runner.stream(self._question(query, scope, **options))

    def answer(self, query: str, *, scope: Hashable = None, **options: Any) -> A:
        """Return a stream that has ended, with its `text`, `usage` and `trace`."""
        return self._runner.answer(self._question(query, scope, **options))

    def _question(
        self, query: str, scope: Hashable, max_tokens: int | None = 256, temperature: float | None = 0.0, **options: Any
    ) -> Question:
        question = Question(query, scope, max_tokens, temperature, options)
        checked_options(question.all_options(), scope, self._send_salt)
        return question


class PipelinedClient(_BasePipelinedClient[PipelinedStream, Coroutine[Any, Any, PipelinedStream]]):
    """`OrderedClient` that overlaps retrieval with prefill. Use `async with`, or close it.

        client = PipelinedClient(
            openai.AsyncOpenAI(base_url=url), model="…", orderer=orderer, builder=builder,
            retrieval=plain_retrieval(search),
        )
        async with client, client.stream("Which drawer?") as stream:
            async for text in stream: ...

    `retrieval`: `plain_retrieval` (warm-ups only) or `staged_retrieval`. `report_load` polls vLLM's /metrics during
    searches. Other options and errors as for `OrderedClient` and `ordered_pipeline`.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._runner = self._pipeline

    async def close(self) -> None:
        """End running warm-ups and polls. The openai client stays open."""
        await self._pipeline.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncPipelinedClient(_BasePipelinedClient[SyncStream, SyncStream]):
    """`PipelinedClient` with an event loop on its own thread. Thread-safe.

        with SyncPipelinedClient(openai.AsyncOpenAI(base_url=url), **options) as client:
            print(client.answer("Which drawer?").text)

    `close` ends running requests and closes the openai client, which must have no other user. Raises RuntimeError once
    closed.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._ends.append(client.close)
        self._runner: SyncPipeline[Question] = SyncPipeline(lambda: self._pipeline)

    def close(self) -> None:
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
