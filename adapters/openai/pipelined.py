"""Retrieval overlapped with prefill on real engines (RAGCache++ section 3.6, RAGCache section 5.3)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai.endpoint import OpenAIStreams, checked_options
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question
from ragorder.adapters.openai.server_load import MetricsPoll, PromptLoad
from ragorder.adapters.openai.system_prefix import SystemPrefix, WatchedEngine
from ragorder.orderer import OrdererLike
from ragorder.pipelining import (
    Pipeline,
    PipelinedStream,
    Retrieval,
    SpeculationGain,
    StreamingEngine,
    SyncPipeline,
    SyncStream,
    WarmUp,
)

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

S = TypeVar("S", covariant=True)
A = TypeVar("A", covariant=True)

QuestionRetrieval = Retrieval[Question, Document]

_logger = logging.getLogger("ragorder")


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
      token (None: the number that fits into `token_budget` tokens an iteration).
    - `cautious`: only if recent searches predict a gain.
    - `requests()`: number of requests on the engine, from all clients (None if unknown). `ends` are awaited on closing.

    Raises ValueError for invalid `prompts` and for a `max_prefill_bs` below 1.
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
    @property
    def _runner(self) -> _PipelineLike[S, A]:
        raise NotImplementedError

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

    def stream(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> S:
        """Stream the answer, from the first piece on; closing it early ends retrieval and requests. Options and errors
        as for `OrderedClient.generate`, and the errors of retrieval."""
        return self._runner.stream(self._question(query, scope, max_tokens, temperature, options))

    def answer(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> A:
        """Return a stream that has ended, with its `text`, `usage` and `trace`."""
        return self._runner.answer(self._question(query, scope, max_tokens, temperature, options))

    def _question(
        self, query: str, scope: Hashable, max_tokens: int | None, temperature: float | None, options: dict[str, Any]
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

    - `retrieval`: called with the `Question`: `plain_retrieval` (warm-ups only) or `staged_retrieval`.
    - `report_load`: poll vLLM's /metrics for its number of requests during searches.

    Other options and errors as for `OrderedClient` and `ordered_pipeline`.
    """

    @property
    def _runner(self) -> Pipeline[Question, Document, PromptRequest]:
        return self._pipeline

    async def close(self) -> None:
        """End running warm-ups and polls. The openai client stays open."""
        await self._pipeline.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncPipelinedClient(_BasePipelinedClient[SyncStream, SyncStream]):
    """`PipelinedClient` for threads, with an event loop on its own thread. Thread-safe.

        with SyncPipelinedClient(openai.AsyncOpenAI(base_url=url), **options) as client:
            print(client.answer("Which drawer?").text)

    `close` ends running requests and the openai client, which nothing else may use. Closed, it raises RuntimeError.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._ends.append(client.close)
        self._sync: SyncPipeline[Question] = SyncPipeline(lambda: self._pipeline)

    @property
    def _runner(self) -> SyncPipeline[Question]:
        return self._sync

    def close(self) -> None:
        self._sync.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
