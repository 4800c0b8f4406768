"""OpenTelemetry spans of workflows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs

if TYPE_CHECKING:
    from ragorder.pipelining.workflow import WorkflowTrace

__all__ = ["WorkflowTracing"]


class WorkflowTracing:
    """Observer for a workflow server: a span `ragorder.workflow` for each request, with a span for each piece of work.

        server = ordered_workflows(…, observers=[WorkflowTracing()])

    `tracer` is an `opentelemetry.trace.Tracer` (default: the application's). Raises ImportError without ragorder[live].
    """

    def __init__(self, tracer: Any = None) -> None:
        with needs("live", "WorkflowTracing"):
            from opentelemetry import trace
        self._trace = trace
        self._tracer = trace.get_tracer("ragorder") if tracer is None else tracer

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
