"""Engines of the suites of kind "serve"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.options import SIM_LIKE, Options
from ragorder.eval.running.runner import Run
from ragorder.eval.running.specs import Bench, EngineSpec, EventsAddress
from ragorder.eval.running.suite import Job
from ragorder.eval.suites.serving.experiment import ServingCell

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool

__all__ = ["Engines"]

_Sizes = tuple[int | None, int | None]


class Engines:
    """An empty cache for each job; engines are kept until a job needs another size, or `close`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pool: EnginePool[Any] | None = None
        self._server: tuple[_Sizes, str, EventsAddress] | None = None
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def serve(self, job: Job, advance: Callable[[], None], *, times_builds: bool) -> list[Run]:
        """The served runs of the job's policies, in their order. Raises as `run_bench` does."""
        if self._pool is None:
            self._pool = self._open_pool()
        (runs,) = run_traces(self._bench(job, times_builds), lambda description, steps: advance, pool=self._pool)
        return runs

    def _open_pool(self) -> EnginePool[Any] | None:
        if self._options.engine == "vllm":
            from ragorder.eval.engines.pool import VLLMPool

            return self._stack.enter_context(VLLMPool())
        if self._options.engine == "torch":
            from ragorder.eval.engines.pool import TorchPool

            return self._stack.enter_context(TorchPool())
        return None

    def _bench(self, job: Job, times_builds: bool) -> Bench:
        options, cell = self._options, job.cell
        live = options.engine == "openai"
        base_url, events = options.base_url, options.events
        if live and base_url is None:
            base_url, events = self._own_server((cell.capacity.tokens, cell.block_size))
        policies = tuple(_served_as(policy, cell) for policy in job.policies)
        return Bench(
            workloads=() if cell.workload is None else (cell.workload,),
            corpora=() if job.corpus is None else (job.corpus,),
            order=cell.order,
            policies=policies,
            engine=options.engine,
            like=SIM_LIKE,
            model=options.model,
            base_urls=() if base_url is None else (base_url,),
            events=events if "events" in policies else None,
            served_model=options.served_model,
            api_key=options.api_key,
            top_k=cell.top_k,
            # A server reports its own cache.
            capacity=None if live else cell.capacity,
            block_size=None if live else cell.block_size,
            output_tokens=cell.output_tokens,
            waiting=cell.waiting,
            batch=cell.batch,
            concurrency=cell.in_flight,
            arrivals=None if cell.arrivals is None else Arrivals.parse(cell.arrivals),
            seeds=(job.seed,),
            limit=job.requests,
            settings=cell.settings,
            time_builds=times_builds,
            timelines=job.suite.keeps_timelines,
        )

    def _own_server(self, sizes: _Sizes) -> tuple[str, EventsAddress]:
        if self._server is None or self._server[0] != sizes:
            from ragorder.eval.engines.capacity import Capacity
            from ragorder.eval.running.live import start_server

            self._stack.close()
            self._stack = ExitStack()
            self._server = None
            spec = EngineSpec(
                engine="openai", model=self._options.model, capacity=Capacity(tokens=sizes[0]), block_size=sizes[1]
            )
            server = self._stack.enter_context(start_server(spec))
            events = EventsAddress(server.events_endpoint, server.replay_endpoint, server.events_topic)
            self._server = (sizes, server.base_url, events)
        return self._server[1:]


def _served_as(policy: str, cell: ServingCell) -> str:
    return "events" if policy == "free" and cell.residency == "events" else policy
