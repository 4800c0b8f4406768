"""Prometheus metrics of decoupled batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragorder.common.extras import needs
from ragorder.pipelining.batching import BatchEvent, RequestTrace

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BatchingMetrics"]

_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class BatchingMetrics:
    """Observer for a `DecoupledServer` with Prometheus metrics by worker and outcome.

    metrics = BatchingMetrics()
    server = ordered_batches(…, observers=[metrics])
    page = generate_latest(metrics.registry)
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        with needs("proxy", "BatchingMetrics"):
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        self.registry = registry = CollectorRegistry() if registry is None else registry

        def counter(name: str, says: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"ragorder_batching_{name}", says, labels, registry=registry)

        def gauge(name: str, says: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(f"ragorder_batching_{name}", says, labels, registry=registry)

        self._requests = counter("requests", "Ended requests by outcome.", ["outcome"])
        self._failures = counter("request_failures", "Failures after which a request went back into its queue.")
        self._waited_s = counter("waited_seconds", "Time that answered requests waited in both queues.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers whose usage was reported.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens of these that the engine had cached.")
        self._total_s = Histogram(
            "ragorder_batching_seconds",
            "Time of an answered request, with all waiting.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._events = counter("events", "Batches by worker and event.", ["worker", "event"])
        self._batch = gauge("batch_size", "Requests that may run at once, as chosen last.", ["worker"])
        self._running = gauge("running", "Requests that run.", ["worker"])
        self._waiting = gauge("waiting", "Requests in a worker's queue.", ["worker"])
        self._kv_tokens = gauge("kv_tokens", "KV tokens of running requests; shared tokens count once.")
        self._partitions = gauge("partitions", "Partitions of the index in memory.")

    def __call__(self, observed: BatchEvent | RequestTrace) -> None:
        if isinstance(observed, RequestTrace):
            self._end(observed)
        else:
            self._note(observed)

    def _note(self, event: BatchEvent) -> None:
        self._events.labels(event.worker, event.event).inc()
        self._batch.labels(event.worker).set(event.batch)
        self._running.labels(event.worker).set(event.running)
        self._waiting.labels(event.worker).set(event.waiting)
        if event.kv_tokens is not None:
            self._kv_tokens.set(event.kv_tokens)
        if event.partitions is not None:
            self._partitions.set(event.partitions)

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
