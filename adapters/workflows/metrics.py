"""Prometheus metrics of workflows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragorder.common.extras import needs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ragorder.pipelining.workflow import WorkflowTrace

__all__ = ["WorkflowMetrics"]

_TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


class WorkflowMetrics:
    """Observer for a workflow server with Prometheus metrics by graph.

    metrics = WorkflowMetrics()
    server = ordered_workflows(…, observers=[metrics])
    page = generate_latest(metrics.registry)
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        with needs("proxy", "WorkflowMetrics"):
            from prometheus_client import CollectorRegistry, Counter, Histogram
        self.registry = registry = CollectorRegistry() if registry is None else registry

        def counter(name: str, says: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"ragorder_workflow_{name}", says, labels, registry=registry)

        self._requests = counter("requests", "Ended requests by outcome.", ["graph", "outcome"])
        self._total_s = Histogram(
            "ragorder_workflow_seconds",
            "Time of an answered request, without waiting for its turn.",
            ["graph"],
            buckets=_TOTAL_S,
            registry=registry,
        )
        self._waited_s = counter("waited_seconds", "Time that requests waited for their turn.")
        self._pieces = counter(
            "pieces", "Pieces of work, by worker, kind (due or speculative) and outcome.", ["worker", "kind", "outcome"]
        )
        self._piece_s = counter(
            "piece_seconds", "Time of pieces, by worker, kind and outcome.", self._pieces._labelnames
        )
        self._refused = counter("refused_speculations", "Speculations for which there was no room.")
        self._declined = counter("declined_speculations", "Speculations without a predicted gain.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of generations whose usage was reported.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens of these that the engine had cached.")
        self._clusters = counter("clusters", "Clusters of the index that searches scanned.")

    def __call__(self, trace: WorkflowTrace) -> None:
        self._requests.labels(trace.graph, trace.outcome).inc()
        if trace.outcome == "answered" and trace.total_s is not None:
            self._total_s.labels(trace.graph).observe(trace.total_s)
        self._waited_s.inc(trace.waited_s)
        self._refused.inc(trace.refused)
        self._declined.inc(trace.declined)
        for piece in trace.pieces:
            labels = piece.worker, piece.kind, piece.outcome
            self._pieces.labels(*labels).inc()
            if piece.started_s is not None and piece.ended_s is not None:
                self._piece_s.labels(*labels).inc(max(0.0, piece.ended_s - piece.started_s))
            if piece.prompt_tokens is not None and piece.cached_tokens is not None:
                self._prompt_tokens.inc(piece.prompt_tokens)
                self._cached_tokens.inc(piece.cached_tokens)
            self._clusters.inc(piece.clusters or 0)
