"""Decoupled batches on ordered prompts, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from ragorder import Document, PromptBuilder
from ragorder.adapters.metrics import PrometheusMetrics
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question, predict_lengths
from ragorder.common.lru_cache import LRUCache
from ragorder.document import content_key
from ragorder.pipelining import CachedLengths, Retrieval, StreamingEngine
from ragorder.pipelining.batching import BatchEvent, BatchRetrieval, DecoupledServer, RequestTrace, TrieKV
from ragorder.pipelining.servers import observer_of
from ragorder.protocols import OrdererLike

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BatchingMetrics", "ordered_batches"]

_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
# Number of next requests that a request's order considers.
_UPCOMING = 8
_COUNTED = 1024


def ordered_batches(
    engine: StreamingEngine[PromptRequest],
    retrieval: BatchRetrieval[Question, Document] | Retrieval[Question, Document],
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    prompts: PromptForm = "messages",
    observers: Sequence[Callable[[BatchEvent | RequestTrace], None]] = (),
    **options: Any,
) -> DecoupledServer[Question, Document, PromptRequest]:
    """Return a `DecoupledServer` that orders documents, on `OpenAIStreams`, `AsyncVLLM` or `EmbeddedStreams`.

        async with ordered_batches(engine, retrieval, orderer=orderer, builder=builder) as server:
            answer = await server.run(Question("Which drawer?"))

    `prompts` as for `OrderedPrompts`, other options as for `DecoupledServer`; shared documents count once in
    `kv_limit`. An observer that fails is logged once and dropped. Raises ValueError for invalid `prompts` and limits
    below 1.
    """
    made = OrderedPrompts(orderer, builder, prompts, waiting=lambda question: _upcoming(server, question))

    counted: LRUCache[int] = LRUCache(_COUNTED)

    def question_tokens(question: Question) -> int:
        # Each choice of the next request compares those that wait.
        key = question.scope, content_key("", question.query)
        tokens = counted.get(key)
        if tokens is None:
            tokens = builder.suffix_tokens(question.query)
            counted.put(key, tokens)
        return tokens

    def suffix_tokens(question: Question) -> int:
        limit = question.max_tokens
        default = orderer.settings.suffix_tokens
        return made.answer_length.suffix_tokens(question_tokens(question), default if limit is None else limit, default)

    def lengths(question: Question, documents: Sequence[Document]) -> CachedLengths:
        return predict_lengths(orderer, documents, question.scope, suffix_tokens(question))

    server: DecoupledServer[Question, Document, PromptRequest] = DecoupledServer(
        retrieval,
        made,
        engine,
        kv=TrieKV(
            key=attrgetter("key"),
            tokens=builder.document_tokens,
            own_tokens=suffix_tokens,
            prefix_tokens=builder.prefix_tokens,
            scope=attrgetter("scope"),
        ),
        lengths=lengths,
        observer=observer_of(observers, "batches") if observers else None,
        **options,
    )
    return server


def _upcoming(server: DecoupledServer[Question, Document, Any], question: Question) -> Sequence[Iterable[Document]]:
    return [documents for other, documents in server.contexts(_UPCOMING) if other.scope == question.scope]


class BatchingMetrics(PrometheusMetrics):
    """Observer for a `DecoupledServer` with Prometheus metrics by worker and outcome."""

    prefix = "ragorder_batching"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._requests = self._counter("requests", "Ended requests by outcome.", "outcome")
        self._failures = self._counter("request_failures", "Failures after which a request went back into its queue.")
        self._waited_s = self._counter("waited_seconds", "Time that answered requests waited in both queues.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers whose usage was reported.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens of these that the engine had cached.")
        self._total_s = self._histogram("seconds", "Time of an answered request, with all waiting.", _SECONDS)
        self._events = self._counter("events", "Batches by worker and event.", "worker", "event")
        self._batch = self._gauge("batch_size", "Requests that may run at once, as chosen last.", "worker")
        self._running = self._gauge("running", "Requests that run.", "worker")
        self._waiting = self._gauge("waiting", "Requests in a worker's queue.", "worker")
        self._kv_tokens = self._gauge("kv_tokens", "KV tokens of running requests; shared tokens count once.")
        self._partitions = self._gauge("partitions", "Partitions of the index in memory.")
        self._placements = self._counter("placements", "Changes of the placement by outcome.", "outcome")
        self._most = self._gauge("most", "Requests that the placement has room for at once.")

    def placed(self, most: int, outcome: Literal["moved", "failed"] | None = None) -> None:
        """Show that the placement has room for `most` requests."""
        self._most.set(most)
        if outcome is not None:
            self._placements.labels(outcome).inc()

    def __call__(self, observed: BatchEvent | RequestTrace) -> None:
        if isinstance(observed, RequestTrace):
            self._end(observed)
            return
        self._events.labels(observed.worker, observed.event).inc()
        self._batch.labels(observed.worker).set(observed.batch)
        self._running.labels(observed.worker).set(observed.running)
        self._waiting.labels(observed.worker).set(observed.waiting)
        if observed.kv_tokens is not None:
            self._kv_tokens.set(observed.kv_tokens)
        if observed.partitions is not None:
            self._partitions.set(observed.partitions)

    def _end(self, trace: RequestTrace) -> None:
        self._requests.labels(trace.outcome).inc()
        self._failures.inc(trace.failures)
        if trace.outcome != "answered" or trace.ended_s is None:
            return
        self._total_s.observe(trace.ended_s - trace.arrived_s)
        self._waited_s.inc(max(0.0, trace.waited_s or 0.0))
        if trace.prompt_tokens is not None and trace.cached_tokens is not None:
            self._prompt_tokens.inc(trace.prompt_tokens)
            self._cached_tokens.inc(trace.cached_tokens)
