"""A busy server: so many requests are in flight, and the others wait for their turn."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.proxy.ordering import ReadBody
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter, QueueFullError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["Turns"]

# So many of those that wait is the cache laid out for.
_FORESEEN = 8
_WAIT_S = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Turns:
    """Lets `max_in_flight` requests at a time through to the server (RAGCache section 5.2).

    Of those that wait, those go first of which its cache has most in relation to what is to be computed. A request
    without documents counts as not cached. Nobody is overtaken by more than `reorder_window` that came later, whoever
    sent them. At most `max_waiting` wait. `registry` gets metrics of it.

    Raises ValueError for numbers that cannot be.
    """

    def __init__(
        self,
        max_in_flight: int,
        *,
        reorder_window: int = 32,
        max_waiting: int = 1000,
        registry: CollectorRegistry | None = None,
    ) -> None:
        queue: CacheAwareQueue[ReadBody | None] = CacheAwareQueue(reorder_window)
        self._gate = ConcurrencyLimiter(max_in_flight, queue, max_waiting=max_waiting)
        self._max_waiting = max_waiting
        self._turned_away = 0
        self._begun = 0
        self._waited_s = 0.0
        self._observe: Callable[[float], None] = lambda wait_s: None
        if registry is not None:
            from prometheus_client import Histogram

            says = "Time that a request waited for its turn."
            wait_s = Histogram("ragorder_wait_seconds", says, buckets=_WAIT_S, registry=registry)
            self._observe = wait_s.observe
            registry.register(self)

    @asynccontextmanager
    async def take(
        self, read: ReadBody | None, lengths: Callable[[], CachedLengths] | None
    ) -> AsyncIterator[list[ReadBody]]:
        """Wait for a turn, and hold it until the block ends; gives those that will probably be next. Raises ProxyError
        if too many wait already."""
        start = time.perf_counter()
        try:
            async with self._gate.slot(read, lengths):
                wait_s = time.perf_counter() - start
                self._begun += 1
                self._waited_s += wait_s
                self._observe(wait_s)
                yield [each for each in self._gate.queue.upcoming(_FORESEEN) if each is not None]
        except QueueFullError:
            self._turned_away += 1
            message = f"{self._max_waiting:,} requests wait already (--max-waiting): try again later."
            retry = [(b"retry-after", b"1")]
            raise ProxyError(503, message, code="too_many_waiting", headers=retry) from None

    def as_json(self) -> dict[str, Any]:
        """The figures since the start of the process."""
        return {
            "max_in_flight": self._gate.limit,
            "in_flight": self._gate.in_flight,
            "waiting": len(self._gate.queue),
            "turned_away": self._turned_away,
            "wait_mean_ms": round(1e3 * self._waited_s / self._begun, 2) if self._begun else 0.0,
        }

    def collect(self) -> Iterable[Metric]:
        """What a Prometheus registry asks for."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        waiting, in_flight = len(self._gate.queue), self._gate.in_flight
        yield GaugeMetricFamily("ragorder_waiting_requests", "Requests that wait for their turn.", value=waiting)
        yield GaugeMetricFamily("ragorder_in_flight_requests", "Requests whose turn it is.", value=in_flight)
        says = "Requests that were not to wait as well."
        yield CounterMetricFamily("ragorder_turned_away_requests", says, value=self._turned_away)
