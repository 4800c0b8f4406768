"""Retrieval overlapped with prefill on real engines (RAGCache++ section 3.6, RAGCache section 5.3)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Self

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai.engine import OpenAIStreams
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question
from ragorder.adapters.openai.request import checked_options
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

QuestionRetrieval = Retrieval[Question, Document]

_logger = logging.getLogger("ragorder")


class _Pipeline(Pipeline[Question, Document, PromptRequest]):
    """A pipeline with more to close than its warm-ups."""

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
    """A pipeline that orders its documents, on any engine: `AsyncVLLM` (give its `requests`), `OpenAIStreams`.

    - `warm_up`: the system prompt is prefilled during retrieval where the engine does not hold it.
    - `speculate`: answers begin on provisional documents while fewer than `max_prefill_bs` requests wait for their
      first token; None: as many as `token_budget` tokens, the engine's for one iteration, have room for.
    - `cautious`: only where recent searches say that it saves more time than it may cost; False: whenever there is
      room, as RAGCache does.
    - `requests` says how many requests the engine has, of everybody (None: only ours are counted).
    - `ends` are awaited when the pipeline is closed.

    Raises ValueError for `prompts` that cannot be, and for a `max_prefill_bs` below 1.
    """
    prefix = SystemPrefix(orderer, builder, engine, prompts)
    load = PromptLoad(prefix.engine, max_prefill_bs=max_prefill_bs, token_budget=token_budget, requests=requests)
    if warm_up and orderer.settings.prefix_tokens == 0 and builder.prefix_tokens >= orderer.settings.block_size:
        _logger.warning("no warm-up: the orderer knows of no system prompt; give it the builder's prefix_tokens")
    pipeline = _Pipeline(
        retrieval,
        OrderedPrompts(orderer, builder, prompts, learn=load.learn),
        prefix.engine,
        warm_up=WarmUp(prefix) if warm_up else None,
        load=load if speculate else None,
        gain=SpeculationGain() if cautious else None,
    )
    pipeline.ends = ends
    return pipeline


class _Client:
    """What the two clients have in common."""

    def __init__(
        self,
        client: Any,
        *,
        model: str,
        orderer: OrdererLike,
        builder: PromptBuilder,
        retrieval: QuestionRetrieval,
        prompts: PromptForm = "messages",
        warm_up: bool = True,
        speculate: bool = True,
        cautious: bool = True,
        max_prefill_bs: int | None = None,
        token_budget: int = 8192,
        report_load: bool = True,
        send_salt: bool = True,
        send_facts: bool = False,
    ) -> None:
        engine = WatchedEngine(OpenAIStreams(client, model, send_salt=send_salt, send_facts=send_facts))
        poll = MetricsPoll(client, engine) if speculate and report_load else None
        self._client = client
        self._send_salt = send_salt
        self._ends: list[Callable[[], Awaitable[None]]] = [] if poll is None else [poll.close]
        searched = retrieval if poll is None else poll.during(retrieval)
        self._pipeline = ordered_pipeline(
            engine,
            orderer=orderer,
            builder=builder,
            retrieval=searched,
            prompts=prompts,
            warm_up=warm_up,
            speculate=speculate,
            cautious=cautious,
            max_prefill_bs=max_prefill_bs,
            token_budget=token_budget,
            requests=poll,
            ends=self._ends,
        )

    def _question(
        self, query: str, scope: Hashable, max_tokens: int | None, temperature: float | None, options: dict[str, Any]
    ) -> Question:
        question = Question(query, scope, max_tokens, temperature, options)
        checked_options(question.all_options(), scope, self._send_salt)
        return question


class PipelinedClient(_Client):
    """Asks an OpenAI-compatible server questions whose documents are still being searched for. Use it by `async with`,
    or close it.

    - `client` is an `openai.AsyncOpenAI`, `model` the model that it is asked for.
    - `retrieval` is given the `Question` and yields what it has found after each stage: `plain_retrieval` for a
      retriever without stages (which gets warm-ups only), `staged_retrieval` for a vector search in stages.
    - `prompts`: "messages" go through chat completions and the server's chat template; "token_ids" go through
      completions, exactly as `builder` made them (which needs the served model's tokenizer).
    - `warm_up`, `speculate`, `cautious`, `max_prefill_bs`, `token_budget` are those of `ordered_pipeline`.
    - `report_load`: while searches run, vLLM's /metrics are asked how many requests it has, at most every 100 ms. A
      server without them is asked less and less; our own are counted then.
    - `send_salt`: a scope that is a string is sent as vLLM's `cache_salt`, which has at most 128 characters, none of
      them @, /, \\ or NUL; False for servers that do not know it.
    - `send_facts`: switch it on for a vLLM with ragorder tiers (docs/tiers.md), as for `AsyncOrderedClient`.

    Every ordering is finished, as by `AsyncOrderedClient`. A server that refuses speculations or warm-ups refuses
    nothing else.

    Raises ImportError without the openai package, TypeError for a synchronous client, ValueError for `prompts` or a
    `max_prefill_bs` that cannot be.
    """

    def stream(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> PipelinedStream:
        """The answer as it arrives. Nothing happens before it is asked for its first piece; closing it early ends
        retrieval and requests.

        `scope` is that of `Orderer.order`, all else goes to create(); None leaves an option to the server. Raises what
        retrieval and the openai client raise, as it is; here TypeError or ValueError for an option that is not the
        caller's to set, and ValueError for a `scope` that cannot be sent as a salt.
        """
        return self._pipeline.stream(self._question(query, scope, max_tokens, temperature, options))

    async def answer(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> PipelinedStream:
        """The whole answer: a stream that has ended, with its `text`, `usage` and `trace`. Takes and raises what
        `stream` does."""
        return await self._pipeline.answer(self._question(query, scope, max_tokens, temperature, options))

    async def close(self) -> None:
        """End the warm-ups and the questions to /metrics that are on their way. The client stays open."""
        await self._pipeline.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncPipelinedClient(_Client):
    """`PipelinedClient` for threads: it works in an event loop on a thread of its own. Thread-safe; use it in a `with`
    block, or close it.

    `client` is an `openai.AsyncOpenAI` that nobody else uses: it is closed with this one.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._ends.append(client.close)
        self._sync: SyncPipeline[Question] = SyncPipeline(lambda: self._pipeline)

    def stream(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> SyncStream:
        """The answer as it arrives. Takes and raises what `PipelinedClient.stream` does; RuntimeError once closed."""
        return self._sync.stream(self._question(query, scope, max_tokens, temperature, options))

    def answer(
        self,
        query: str,
        *,
        scope: Hashable = None,
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> SyncStream:
        """The whole answer. Takes and raises what `stream` does."""
        return self._sync.answer(self._question(query, scope, max_tokens, temperature, options))

    def close(self) -> None:
        """End what is still running, the thread and the client. Closing twice is fine."""
        self._sync.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
