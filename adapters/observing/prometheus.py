"""Prometheus metrics of an orderer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from ragorder.adapters.observing.costs import CostMetrics
from ragorder.adapters.observing.observed import Observation
from ragorder.common.extras import needs
from ragorder.ordering import RequestOutcome

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["Metrics"]

_ORDER_S = (10e-6, 25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)
_TBT_S = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 75e-3, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_POSITIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


class OrdererState(Protocol):
    """State of an orderer, read at each scrape."""

    shadow: bool

    @property
    def tree_size(self) -> int: ...

    @property
    def evicted_blocks(self) -> int: ...


class Metrics:
    """Watcher for `ObservedOrderer` with Prometheus metrics. No label names a document or a tenant.

        metrics = Metrics()
        orderer = ObservedOrderer(orderer, [metrics])
        page = generate_latest(metrics.registry)

    `registry` is the application's (`prometheus_client.REGISTRY`), or by default a new one. Cached tokens have a label
    `order`, "ragorder" or "retrieval": reported or else predicted for the served order, predicted for the other. Raises
    ImportError without ragorder[proxy], ValueError for a registry with these metrics: share the Metrics instead.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        with needs("proxy", "Metrics"):
            from prometheus_client import CollectorRegistry, Counter, Histogram
        self.registry = registry = CollectorRegistry() if registry is None else registry

        def counter(name: str, says: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"ragorder_{name}", says, labels, registry=registry)

        self._order_s = Histogram(
            "ragorder_order_seconds", "Time that ordering one request took.", buckets=_ORDER_S, registry=registry
        )
        self._displacement = Histogram(
            "ragorder_displacement_positions",
            "Mean distance of a request's documents from where retrieval put them, in ragorder's order.",
            buckets=_POSITIONS,
            registry=registry,
        )
        self._tbt_s = Histogram(
            "ragorder_time_between_tokens_seconds",
            "Mean time between the tokens of a streamed answer (RAGCache 5.4).",
            buckets=_TBT_S,
            registry=registry,
        )
        self._documents = counter("documents", "Documents ordered.")
        self._reordered = counter(
            "reordered_requests",
            "Requests whose documents ragorder's order moves, by whether something or nothing should be cached.",
            ["cached"],
        )
        self._best_moved = counter(
            "best_moved_requests", "Requests that ragorder's order begins with a document other than the best one."
        )
        self._passed = counter("passed_requests", "Requests forwarded unchanged, by reason.", ["reason"])
        self._recognised = counter(
            "recognised_requests", "Requests without --template whose documents a preset finds, by preset.", ["preset"]
        )
        self._recognised_tokens = counter(
            "recognised_tokens",
            "Tokens of these requests up to their last document, and those that the preset's order and retrieval order "
            "would find in the cache.",
            ["preset", "of"],
        )
        self._fallbacks = counter("fallbacks", "Requests left in retrieval order after an internal error.")
        self._settled = counter("settled_requests", "Requests that ended.", ["outcome"])
        self._reports = counter("reports", "Served requests whose cached tokens the engine reported.")
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of served requests; without a report, tokens up to the last document."
        )
        self._cached_tokens = counter("cached_tokens", "Cached tokens of served requests, by order.", ["order"])
        self._reported_tokens = counter("reported_cached_tokens", "Cached tokens that the engine reported.")
        self._predicted_tokens = counter(
            "predicted_cached_tokens", "Cached tokens predicted for requests whose cached tokens the engine reported."
        )
        self._error_tokens = counter("prediction_error_tokens", "Absolute difference between predicted and reported.")
        self._squared_tokens = counter("prediction_error_squared_tokens", "The square of that difference.")
        self._costs = CostMetrics(registry)
        self._watched: WeakValueDictionary[int, OrdererState] = WeakValueDictionary()
        self.read(_StateCollector(self._watched))

    @property
    def whole(self) -> CollectorRegistry:
        return self.registry

    def read(self, collector: Collector) -> None:
        """Add metrics without labels, whose values are read when a page is made."""
        self.registry.register(collector)

    def read_process(self) -> None:
        from prometheus_client import ProcessCollector

        self.read(ProcessCollector(registry=None))

    def watch(self, orderer: OrdererState) -> None:
        self._watched[id(orderer)] = orderer

    def passed(self, reason: str) -> None:
        """Count a request forwarded without ordering, for a `reason` in docs/proxy.md."""
        self._passed.labels(reason).inc()

    def recognised(self, preset: str, prompt_tokens: int, ordered_tokens: int, retrieval_tokens: int) -> None:
        """Count a request in which a preset of the proxy's templates finds documents."""
        self._recognised.labels(preset).inc()
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
    def __init__(self, watched: WeakValueDictionary[int, OrdererState]) -> None:
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
