"""Cache-aware reordering of a queue under overload (RAGCache 5.2, Figure 21): the suites of kind "reordering"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ragorder.benchmarks.ragcache.reordering.queueing import (
    DISCIPLINES,
    LiveQueues,
    QueueServer,
    SimulatedQueues,
    own_server,
)
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.trace import Trace, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.load import ServiceTimes, rotated
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Reordering", "ReorderingCell", "ReorderingRecord"]


def _capacity(value: object) -> object:
    return None if value == "unlimited" else value


class ReorderingCell(SuiteCell):
    """`load` is the arrival rate as a multiple of the rate at which a full queue is served first come, first served.

    At most `max_in_flight` requests (the paper has 4) are at the engine; `capacity_tokens` is its cache. `window` is
    the reordered queues'. `prefill_rate`, in tokens/s, is the simulated engine's.
    """

    workload: Annotated[str, one_of("workload", WORKLOADS)]
    capacity_tokens: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_capacity)] = 16_000
    load: float = Field(gt=0)
    requests: int = Field(600, ge=1)
    window: int = Field(32, ge=0)
    max_in_flight: int = Field(4, ge=1)
    output_tokens: int = Field(1, ge=1)
    prefill_rate: float = Field(20_000.0, gt=0)


class ReorderingRecord(RunRecord):
    """A queue discipline on a trace. `facts`: the arrival rate, the whole time, the largest overtaking."""

    type: Literal["reordering"] = "reordering"  # type: ignore[assignment]


class Reordering(Experiment):
    kind = "reordering"
    record = ReorderingRecord
    cell = ReorderingCell
    policies: ClassVar[Any] = DISCIPLINES
    one_job = True
    unit = "queues"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rates: dict[object, float] = {}

    def obstacle(self, suite: Suite, cell: ReorderingCell, policy: str) -> str | None:
        if self.options.engine == "torch":
            if DISCIPLINES[policy].waiting:
                return "the embedded engine's documents are ordered on arrival, before their request waits"
            return lacks_torch()
        if self.options.engine not in ("sim", "openai"):
            return "queues are served by --engine sim, torch or openai"
        if self.options.base_url is not None and len({each.capacity_tokens for each in suite.cells}) > 1:
            return "a running server has one cache size: leave out --base-url, or --set capacity_tokens=unlimited"
        return None

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ReorderingCell = job.cell
        trace = trace_of_workload(make_workload(cell.workload, job.seed, requests=job.requests), job.requests)
        queues = self._queues(cell)
        rate = cell.load * self._rate(cell, job, trace, queues)
        at_s = [arrival.at_s for arrival in poisson_arrivals(rate, job.requests, job.seed)]
        for policy in rotated(job.policies, job.seed):
            served = queues.serve(trace, at_s, DISCIPLINES[policy].within(cell.window))
            tbt_ms = [None if seconds is None else round(1e3 * seconds, 3) for seconds in served.tbt_s]
            yield {
                "policy": policy,
                "engine": queues.engine,
                "load_average": load_average(),
                "rows": {
                    "prompt_tokens": served.prompt_tokens,
                    "cached_tokens": served.cached_tokens,
                    "ttft_ms": [round(1e3 * seconds, 3) for seconds in served.ttft_s],
                    **({} if tbt_ms.count(None) == len(tbt_ms) else {"tbt_ms": tbt_ms}),
                },
                "facts": {
                    "requests_per_s": rate,
                    "total_s": served.total_s,
                    "largest_overtaking": served.largest_overtaking,
                },
            }
            advance()

    def _rate(self, cell: ReorderingCell, job: Job, trace: Trace, queues: QueueServer) -> float:
        key = (cell.model_copy(update={"load": 1.0}), job.seed, job.requests)
        if key not in self._rates:
            served = queues.serve(trace, [0.0] * job.requests, DISCIPLINES["fcfs"])
            self._rates[key] = job.requests / served.total_s
        return self._rates[key]

    def _queues(self, cell: ReorderingCell) -> QueueServer:
        """Raises EngineError for a server that cannot be measured."""
        options, shape = self.options, (cell.max_in_flight, cell.output_tokens)
        times = ServiceTimes(cell.prefill_rate)
        if options.engine == "sim":
            return SimulatedQueues(cell.capacity_tokens, *shape, times)
        if options.engine == "torch":
            from ragorder.benchmarks.kernels.embedded.shapes import SHAPES
            from ragorder.benchmarks.ragcache.reordering.embedded_queue import EmbeddedQueues

            return self.kept(
                ("torch", cell.capacity_tokens, cell.prefill_rate, *shape),
                lambda: EmbeddedQueues(cell.capacity_tokens, *shape, times, model=SHAPES["tiny"].make()),
            )

        def start() -> LiveQueues:
            url = options.base_url
            if url is None:
                url = self.resources.enter_context(own_server(options.model, cell.capacity_tokens)).base_url
            return LiveQueues(url, *shape, options)

        return self.kept((cell.capacity_tokens, *shape), start)
