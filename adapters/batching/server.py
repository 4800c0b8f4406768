"""Server of decoupled batches with ordered documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question
from ragorder.orderer import OrdererLike
from ragorder.pipelining import CachedLengths, Retrieval, StreamingEngine
from ragorder.pipelining.batching import (
    Batcher,
    BatchEvent,
    BatchRetrieval,
    DecoupledServer,
    Relief,
    RequestTrace,
    ServingPlacement,
    TrieKV,
)
from ragorder.pipelining.servers import observer_of

__all__ = ["ordered_batches"]

# Number of next requests that a request's order considers.
_UPCOMING = 8


def ordered_batches(
    engine: StreamingEngine[PromptRequest],
    retrieval: BatchRetrieval[Question, Document] | Retrieval[Question, Document],
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    prompts: PromptForm = "messages",
    placement: ServingPlacement | None = None,
    batching: Batcher | None = None,
    searching: Batcher | None = None,
    joins: bool = True,
    kv_limit: int | None = None,
    window: int = 32,
    reliefs: Sequence[Relief] = (),
    max_requests: int = 1024,
    max_contexts: int = 256,
    observers: Sequence[Callable[[BatchEvent | RequestTrace], None]] = (),
) -> DecoupledServer[Question, Document, PromptRequest]:
    """Return a `DecoupledServer` that orders documents, on `OpenAIStreams`, `AsyncVLLM` or `EmbeddedStreams`.

        async with ordered_batches(engine, retrieval, orderer=orderer, builder=builder) as server:
            answer = await server.run(Question("Which drawer?"))

    - `prompts`: "messages" for a server's chat template, "token_ids" for an engine in this process
    - `kv_limit`: KV tokens of concurrent requests; documents that they share count once
    - `window`: cached requests go first, and at most this many overtake another one
    - `observers`: get each batch's events and each ended request's trace; one that fails is logged once and dropped

    Other options as for `DecoupledServer`. Raises ValueError for invalid `prompts` and for limits below 1.
    """
    made = OrderedPrompts(orderer, builder, prompts, waiting=lambda question: _upcoming(server, question))

    def suffix_tokens(question: Question) -> int:
        limit = question.max_tokens
        default = orderer.settings.suffix_tokens
        return made.answer_length.suffix_tokens(
            builder.suffix_tokens(question.query), default if limit is None else limit, default
        )

    def lengths(question: Question, documents: Sequence[Document]) -> CachedLengths:
        cached, end = orderer.predict_cached_tokens(documents, scope=question.scope)
        return CachedLengths(cached, end + suffix_tokens(question) - cached)

    server: DecoupledServer[Question, Document, PromptRequest] = DecoupledServer(
        retrieval,
        made,
        engine,
        placement=placement,
        batching=batching,
        searching=searching,
        joins=joins,
        kv=TrieKV(
            key=attrgetter("key"),
            tokens=builder.document_tokens,
            own_tokens=suffix_tokens,
            prefix_tokens=builder.prefix_tokens,
            scope=attrgetter("scope"),
        ),
        kv_limit=kv_limit,
        lengths=lengths,
        window=window,
        reliefs=reliefs,
        max_requests=max_requests,
        max_contexts=max_contexts,
        observer=observer_of(observers, "batches") if observers else None,
    )
    return server


def _upcoming(server: DecoupledServer[Question, Document, Any], question: Question) -> Sequence[Iterable[Document]]:
    return [documents for other, documents in server.contexts(_UPCOMING) if other.scope == question.scope]
