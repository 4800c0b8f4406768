"""Tokens that fused requests compute: the suites of kind "fused-orders"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.fusion.fused_orders.measuring import ORDERS, measure
from ragorder.benchmarks.fusion.fused_orders.record import FusedOrdersCell, FusedOrdersRecord
from ragorder.benchmarks.ragcache.replacement.streams import stream_of_trace
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["FusedOrders"]


class FusedOrders(Experiment):
    kind = "fused-orders"
    record = FusedOrdersRecord
    cell = FusedOrdersCell
    policies: ClassVar[Any] = ORDERS

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: FusedOrdersCell = job.cell
        assert job.corpus is not None, "a cell has a corpus"
        trace = trace_of_corpus(job.corpus, top_k=cell.top_k, order=cell.order, seed=job.seed, limit=job.requests)
        stream = stream_of_trace(trace)
        for policy in job.policies:
            rows = measure(stream, cell, policy, advance)
            yield {"policy": policy, "engine": {"name": "sim"}, "rows": rows}
