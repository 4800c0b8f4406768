"""OpenTelemetry spans of an orderer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ragorder.adapters.observing.observed import Observation
from ragorder.common.extras import needs
from ragorder.ordering import RequestOutcome


class SpanTracer:
    """`tracer`: OpenTelemetry's (default: the application's). Raises ImportError without ragorder[live]."""

    def __init__(self, tracer: Any = None) -> None:
        with needs("live", type(self).__name__):
            from opentelemetry import trace
        self._trace = trace
        self._tracer = trace.get_tracer("ragorder") if tracer is None else tracer


class Tracing(SpanTracer):
    """Watcher that makes a span `ragorder.order` and, linked to it, `ragorder.settle` with the engine's report.

        orderer = ObservedOrderer(orderer, [Tracing()])

    `tracer` as for `SpanTracer`.
    """

    def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
        end_ns = time.time_ns()
        attributes = {
            "ragorder.shadow": observation.shadow,
            "ragorder.documents": observation.documents,
            "ragorder.predicted_cached_tokens": observation.predicted_tokens,
            "ragorder.reordered": observation.moves.reordered,
            "ragorder.displacement": observation.moves.places,
            "ragorder.fallback": observation.fallback,
        }
        start_ns = end_ns - round(observation.order_s * 1e9)
        span = self._tracer.start_span("ragorder.order", attributes=attributes, start_time=start_ns)
        span.end(end_ns)
        link = self._trace.Link(span.get_span_context())
        return lambda outcome: self._finished(outcome, link)

    def _finished(self, outcome: RequestOutcome, link: Any) -> None:
        reported = {
            "ragorder.reported_cached_tokens": outcome.cached_tokens,
            "ragorder.prompt_tokens": outcome.prompt_tokens,
        }
        attributes = {name: int(tokens) for name, tokens in reported.items() if tokens is not None}
        attributes["ragorder.served"] = outcome.served
        self._tracer.start_span("ragorder.settle", attributes=attributes, links=[link]).end()
