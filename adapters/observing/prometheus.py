"""Prometheus metrics of an orderer, in one or several processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ragorder.adapters.metrics import PrometheusMetrics
from ragorder.adapters.observing.costs import CostMetrics
from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.ordering import RequestOutcome

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

_ORDER_S = (10e-6, 25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)
_TBT_S = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 75e-3, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_POSITIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
# How values of processes are combined; others are summed.
_MODES: Mapping[str, Any] = {
    "ragorder_shadow": "livemax",
    "process_start_time_seconds": "livemin",
    "process_max_fds": "livemin",
}


class Metrics(PrometheusMetrics):
    """Watcher with Prometheus metrics.

        metrics = Metrics()
        orderer = ObservedOrderer(orderer, [metrics])
        page = generate_latest(metrics.registry)

    Cached tokens have a label `order`, "ragorder" or "retrieval": the served order's are as reported, or else
    predicted; the other's are predicted.
    """

    prefix = "ragorder"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        counter = self._counter
        self._order_s = self._histogram("order_seconds", "Time that ordering one request took.", _ORDER_S)
        says = "Mean distance of a request's documents from where retrieval put them, in ragorder's order."
        self._displacement = self._histogram("displacement_positions", says, _POSITIONS)
        says = "Mean time between the tokens of a streamed answer (RAGCache 5.4)."
        self._tbt_s = self._histogram("time_between_tokens_seconds", says, _TBT_S)
        self._documents = counter("documents", "Documents ordered.")
        says = "Requests whose documents ragorder's order moves, by whether something or nothing should be cached."
        self._reordered = counter("reordered_requests", says, "cached")
        says = "Requests that ragorder's order begins with a document other than the best one."
        self._best_moved = counter("best_moved_requests", says)
        self._passed = counter("passed_requests", "Requests forwarded unchanged, by reason.", "reason")
        says = "Requests without --template whose documents a preset finds, by preset."
        self._recognised = counter("recognised_requests", says, "preset")
        says = "Tokens of these requests up to the last document, and those cached by the preset's or retrieval order."
        self._recognised_tokens = counter("recognised_tokens", says, "preset", "of")
        self._fallbacks = counter("fallbacks", "Requests left in retrieval order after an internal error.")
        self._settled = counter("settled_requests", "Requests that ended.", "outcome")
        self._reports = counter("reports", "Served requests whose cached tokens the engine reported.")
        says = "Prompt tokens of served requests; without a report, tokens up to the last document."
        self._prompt_tokens = counter("prompt_tokens", says)
        self._cached_tokens = counter("cached_tokens", "Cached tokens of served requests, by order.", "order")
        self._reported_tokens = counter("reported_cached_tokens", "Cached tokens that the engine reported.")
        says = "Cached tokens predicted for requests whose cached tokens the engine reported."
        self._predicted_tokens = counter("predicted_cached_tokens", says)
        self._error_tokens = counter("prediction_error_tokens", "Absolute difference between predicted and reported.")
        self._squared_tokens = counter("prediction_error_squared_tokens", "The square of that difference.")
        self._costs = CostMetrics(self.registry)
        self._watched: WeakValueDictionary[int, ObservedOrderer] = WeakValueDictionary()
        self.read(_StateCollector(self._watched))

    @property
    def whole(self) -> CollectorRegistry:
        return self.registry

    def read(self, collector: Collector) -> None:
        """Add metrics without labels, read when a page is made."""
        self.registry.register(collector)

    def read_process(self) -> None:
        from prometheus_client import ProcessCollector

        self.read(ProcessCollector(registry=None))

    def watch(self, orderer: ObservedOrderer) -> None:
        self._watched[id(orderer)] = orderer

    def passed(self, reason: str) -> None:
        self._passed.labels(reason).inc()

    def recognised(
        self, preset: str, prompt_tokens: int, ordered_tokens: int, retrieval_tokens: int, requests: int = 1
    ) -> None:
        self._recognised.labels(preset).inc(requests)
        for name, tokens in (("prompt", prompt_tokens), ("ragorder", ordered_tokens), ("retrieval", retrieval_tokens)):
            self._recognised_tokens.labels(preset, name).inc(tokens)

    def token_times(self, tbt_s: float) -> None:
        self._tbt_s.observe(tbt_s)

    def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
        self._order_s.observe(observation.order_s)
        moves = observation.moves
        self._displacement.observe(moves.places)
        if moves.reordered:
            self._reordered.labels("nothing" if moves.cold else "some").inc()
            self._best_moved.inc(moves.best_moved)
        self._documents.inc(observation.documents)
        if observation.fallback:
            self._fallbacks.inc()
        return lambda outcome: self._count(observation, outcome)

    def _count(self, observation: Observation, outcome: RequestOutcome) -> None:
        self._settled.labels("served" if outcome.served else "discarded").inc()
        if not outcome.served:
            return
        prompt_tokens, reported = outcome.prompt_tokens, outcome.cached_tokens
        if prompt_tokens is not None and reported is not None and reported > prompt_tokens:
            # One of the two is wrong.
            prompt_tokens = reported = None
        if prompt_tokens is None:
            prompt_tokens = max(observation.documents_end, reported or 0)
        predicted = min(observation.predicted_tokens, prompt_tokens)
        if reported is not None:
            self._reports.inc()
            self._reported_tokens.inc(reported)
            self._predicted_tokens.inc(predicted)
            self._error_tokens.inc(abs(predicted - reported))
            self._squared_tokens.inc((predicted - reported) ** 2)
        self._prompt_tokens.inc(prompt_tokens)
        served, other = ("retrieval", "ragorder") if observation.shadow else ("ragorder", "retrieval")
        self._cached_tokens.labels(served).inc(predicted if reported is None else reported)
        other_tokens = observation.ordered_tokens if observation.shadow else observation.retrieval_tokens
        if other_tokens is not None:
            self._cached_tokens.labels(other).inc(min(other_tokens, prompt_tokens))
        if outcome.cost is not None:
            other_cost = observation.ordered_cost if observation.shadow else observation.retrieval_cost
            self._costs.count(outcome.cost, served, other, other_cost)


class _StateCollector:
    def __init__(self, watched: WeakValueDictionary[int, ObservedOrderer]) -> None:
        self._watched = watched

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        # A copy: an application may watch another orderer while a page is made.
        watched = [orderer for known in self._watched.valuerefs() if (orderer := known()) is not None]
        nodes = sum(orderer.tree_size for orderer in watched)
        yield GaugeMetricFamily("ragorder_tree_nodes", "Nodes in the knowledge trees.", value=nodes)
        blocks = sum(orderer.evicted_blocks for orderer in watched)
        yield CounterMetricFamily("ragorder_evicted_blocks", "KV blocks counted as evicted.", value=blocks)
        shadow = max((orderer.shadow for orderer in watched), default=False)
        says = "1 in shadow mode: retrieval order is served, ragorder's is only scored."
        yield GaugeMetricFamily("ragorder_shadow", says, value=int(shadow))


@contextmanager
def shared_metrics() -> Iterator[None]:
    """Keep metrics made in this block in files, by prometheus_client's multiprocess mode: counters of all processes add
    up, gauges of running ones."""
    from prometheus_client import values

    with tempfile.TemporaryDirectory(prefix="ragorder-metrics-") as folder:
        os.environ[_FOLDER] = folder
        # The package reads the variable on import, which may have happened before.
        before, values.ValueClass = values.ValueClass, values.get_value_class()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            values.ValueClass = before
            del os.environ[_FOLDER]


def forget_process(pid: int) -> None:
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid)  # type: ignore[no-untyped-call]


class SharedMetrics(Metrics):
    """`Metrics` of one process in a `shared_metrics` block; `whole` has all. `copy`, called now and then in one thread,
    shares what `read` has added."""

    def __init__(self) -> None:
        self._collectors: list[Collector] = []
        self._copies: dict[str, Any] = {}
        self._counted: dict[str, float] = {}
        super().__init__()

    @property
    def whole(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def read(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def copy(self) -> None:
        for collector in self._collectors:
            for family in collector.collect():
                (sample,) = family.samples
                copy = self._copy_of(family.name, family.type, family.documentation)
                if family.type == "counter":
                    counted = self._counted.get(family.name, 0.0)
                    copy.inc(max(0.0, sample.value - counted))
                    self._counted[family.name] = max(counted, sample.value)
                else:
                    copy.set(sample.value)

    def _copy_of(self, name: str, kind: str, says: str) -> Any:
        from prometheus_client import Counter, Gauge

        if name not in self._copies:
            self._copies[name] = (
                Counter(name, says, registry=self.registry)
                if kind == "counter"
                else Gauge(name, says, multiprocess_mode=_MODES.get(name, "livesum"), registry=self.registry)
            )
        return self._copies[name]
