"""Cache-aware admission to a busy server (RAGCache section 5.2)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter, QueueFullError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

# Number of waiting requests that the next request's order considers.
_UPCOMING = 8
_WAIT_S = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class AdmissionQueue:
    """Admits `max_in_flight` requests at a time, by the largest ratio of cached to uncached tokens. At most
    `max_waiting` wait, and `reorder_window` later ones overtake one."""

    def __init__(
        self,
        max_in_flight: int,
        *,
        reorder_window: int = 32,
        max_waiting: int = 1000,
        registry: CollectorRegistry | None = None,
    ) -> None:
        queue: CacheAwareQueue[ParsedBody | None] = CacheAwareQueue(reorder_window)
        self._limiter = ConcurrencyLimiter(max_in_flight, queue, max_waiting=max_waiting)
        self._max_waiting = max_waiting
        self._turned_away = 0
        self._admitted = 0
        self._waited_s = 0.0
        self._observe: Callable[[float], None] = lambda wait_s: None
        if registry is not None:
            from prometheus_client import Histogram

            description = "Time that a request waited for admission."
            wait_s = Histogram("ragorder_wait_seconds", description, buckets=_WAIT_S, registry=registry)
            self._observe = wait_s.observe
            registry.register(self)

    @asynccontextmanager
    async def admit(
        self, parsed: ParsedBody | None, predict: Callable[[ParsedBody], CachedLengths]
    ) -> AsyncIterator[None]:
        """Hold a slot. Raises HTTPError if too many wait."""
        start = time.perf_counter()
        slot = self._limiter.slot(parsed, None if parsed is None else partial(predict, parsed))
        # A slot is held as long as the answer takes.
        del parsed
        try:
            async with slot:
                wait_s = time.perf_counter() - start
                self._admitted += 1
                self._waited_s += wait_s
                self._observe(wait_s)
                yield
        except QueueFullError:
            self._turned_away += 1
            message = f"too many requests are waiting already (--max-waiting {self._max_waiting:,}): try again later."
            retry = [(b"retry-after", b"1")]
            raise HTTPError(503, message, code="too_many_waiting", headers=retry) from None

    def upcoming(self) -> list[ParsedBody]:
        """Return the probably next requests."""
        return [each for each in self._limiter.queue.upcoming(_UPCOMING) if each is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "max_in_flight": self._limiter.limit,
            "in_flight": self._limiter.in_flight,
            "waiting": len(self._limiter.queue),
            "turned_away": self._turned_away,
            "wait_mean_ms": round(1e3 * self._waited_s / self._admitted, 2) if self._admitted else 0.0,
        }

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        waiting, in_flight = len(self._limiter.queue), self._limiter.in_flight
        yield GaugeMetricFamily("ragorder_waiting_requests", "Requests that wait for admission.", value=waiting)
        yield GaugeMetricFamily(
            "ragorder_in_flight_requests", "Requests sent to the server and not yet answered.", value=in_flight
        )
        description = "Requests refused because too many were waiting."
        yield CounterMetricFamily("ragorder_turned_away_requests", description, value=self._turned_away)
