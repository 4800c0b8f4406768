"""Metrics in a Prometheus registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ragorder.common.extras import needs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class PrometheusMetrics:
    """Base of metrics whose names begin with `prefix`. No label names a document or a tenant.

    `registry` defaults to a new one. Raises ImportError without ragorder[proxy], ValueError for a registry that has
    these metrics.
    """

    prefix: ClassVar[str]

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        with needs("proxy", type(self).__name__):
            from prometheus_client import CollectorRegistry
        self.registry = CollectorRegistry() if registry is None else registry

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        from prometheus_client import Counter

        return Counter(f"{self.prefix}_{name}", says, labels, registry=self.registry)

    def _gauge(self, name: str, says: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(f"{self.prefix}_{name}", says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: Sequence[float], *labels: str) -> Histogram:
        from prometheus_client import Histogram

        return Histogram(f"{self.prefix}_{name}", says, labels, buckets=buckets, registry=self.registry)
