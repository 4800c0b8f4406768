"""Metrics summed over several processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ragorder.adapters.observing.prometheus import Metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

__all__ = ["SharedMetrics", "forget_process", "shared_metrics"]

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
# How values of processes are combined; others are summed.
_MODES: Mapping[str, Any] = {
    "ragorder_shadow": "livemax",
    "process_start_time_seconds": "livemin",
    "process_max_fds": "livemin",
}


@contextmanager
def shared_metrics() -> Iterator[None]:
    """Store metrics made in this block in files, by prometheus_client's multiprocess mode: none is lost with its
    process. Counters sum all processes, gauges the running ones."""
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
    """`Metrics` of one process of a `shared_metrics` block; `whole` has the metrics of all.

    Other processes cannot read values that are computed when a page is made: `copy` stores them in the files.
    """

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
        """Copy the values. Call it now and then, in one thread."""
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
