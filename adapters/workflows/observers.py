"""Observers of a workflow server: metrics, spans and a file of traces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from ragorder.adapters.metrics import PrometheusMetrics
from ragorder.adapters.observing.opentelemetry import SpanTracer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ragorder.pipelining.workflow import WorkflowTrace

_TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


class WorkflowMetrics(PrometheusMetrics):
    """Observer for a workflow server with Prometheus metrics by graph."""

    prefix = "ragorder_workflow"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._requests = self._counter("requests", "Ended requests by outcome.", "graph", "outcome")
        self._total_s = self._histogram(
            "seconds", "Time of an answered request, without waiting for its turn.", _TOTAL_S, "graph"
        )
        self._waited_s = self._counter("waited_seconds", "Time that requests waited for their turn.")
        labels = "worker", "kind", "outcome"
        self._pieces = self._counter(
            "pieces", "Pieces of work, by worker, kind (due or speculative) and outcome.", *labels
        )
        self._piece_s = self._counter("piece_seconds", "Time of pieces, by worker, kind and outcome.", *labels)
        self._from_memory = self._counter(
            "pieces_from_memory", "Pieces answered by an earlier one of their request.", "worker"
        )
        self._refused = self._counter("refused_speculations", "Speculations for which there was no room.")
        self._declined = self._counter("declined_speculations", "Speculations without a predicted gain.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of generations whose usage was reported.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens of these that the engine had cached.")
        self._wasted_tokens = self._counter(
            "wasted_tokens", "Tokens of prompts and answers of speculative generations that were not used."
        )
        self._wasted_searches = self._counter("wasted_searches", "Speculative searches that were not used.")
        self._clusters = self._counter("clusters", "Clusters of the index that searches scanned.")

    def __call__(self, trace: WorkflowTrace) -> None:
        self._requests.labels(trace.graph, trace.outcome).inc()
        if trace.outcome == "answered" and trace.total_s is not None:
            self._total_s.labels(trace.graph).observe(trace.total_s)
        self._waited_s.inc(trace.waited_s)
        self._refused.inc(trace.refused)
        self._declined.inc(trace.declined)
        self._wasted_tokens.inc(trace.wasted_tokens)
        self._wasted_searches.inc(trace.wasted_searches)
        for piece in trace.pieces:
            labels = piece.worker, piece.kind, piece.outcome
            self._pieces.labels(*labels).inc()
            if piece.from_memory:
                self._from_memory.labels(piece.worker).inc()
            if piece.started_s is not None and piece.ended_s is not None:
                self._piece_s.labels(*labels).inc(max(0.0, piece.ended_s - piece.started_s))
            if piece.prompt_tokens is not None and piece.cached_tokens is not None:
                self._prompt_tokens.inc(piece.prompt_tokens)
                self._cached_tokens.inc(piece.cached_tokens)
            self._clusters.inc(piece.clusters or 0)


class WorkflowTracing(SpanTracer):
    """Observer for a workflow server: an OpenTelemetry span `ragorder.workflow` for each request, with one for each
    piece of work."""

    def __call__(self, trace: WorkflowTrace) -> None:
        end_ns = time.time_ns()
        start_ns = end_ns - round((trace.total_s or 0.0) * 1e9)

        def at(seconds: float | None) -> int:
            return end_ns if seconds is None else min(end_ns, start_ns + round(seconds * 1e9))

        attributes: dict[str, Any] = {
            "ragorder.graph": trace.graph,
            "ragorder.outcome": trace.outcome,
            "ragorder.waited_s": trace.waited_s,
            "ragorder.rounds": sum(trace.rounds.values()),
        }
        span = self._tracer.start_span("ragorder.workflow", attributes=attributes, start_time=start_ns)
        inside = self._trace.set_span_in_context(span)
        for piece in trace.pieces:
            if piece.started_s is None:
                continue
            known: dict[str, Any] = {
                "ragorder.node": str(piece.node),
                "ragorder.kind": piece.kind,
                "ragorder.outcome": piece.outcome,
                "ragorder.prompt_tokens": piece.prompt_tokens,
                "ragorder.cached_tokens": piece.cached_tokens,
                "ragorder.clusters": piece.clusters,
            }
            own = {name: value for name, value in known.items() if value is not None}
            name = f"ragorder.{piece.worker}"
            part = self._tracer.start_span(name, context=inside, attributes=own, start_time=at(piece.started_s))
            part.end(at(piece.ended_s))
        span.end(end_ns)


class TraceLog:
    """Observer for a workflow server: a line of JSON for each request, without its text, for `ragorder workflow trace`.
    Thread-safe.

        with TraceLog("trace.jsonl") as log:
            server = ordered_workflows(…, observers=[log])

    Raises OSError for an unwritable file.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        self._lock = Lock()

    def __call__(self, trace: WorkflowTrace) -> None:
        line = json.dumps(trace.as_record(), ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
