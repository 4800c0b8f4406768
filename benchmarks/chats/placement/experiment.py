"""Cached tokens by where documents stand in a prompt: the suites of kind "placement"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.chats.placement.prompts import PLACES, PlacedPrompts
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.load import serve_in_turn
from ragorder.eval.running.options import SIM_LIKE
from ragorder.eval.running.policies import ORDERERS, make_policy
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.runner import Run
from ragorder.eval.running.suite import Experiment, Job, Line

__all__ = ["Placement", "PlacementCell", "PlacementRecord"]


class PlacementCell(SuiteCell):
    """`documents`: where they stand, or what stands in front of each."""

    documents: Annotated[str, one_of("place", PLACES)] = "in front"
    workload: Annotated[str, one_of("workload", WORKLOADS)] = "paper-shuf"
    capacity_tokens: int = Field(100_000, ge=1)
    block_size: int = Field(16, ge=1)


class PlacementRecord(RunRecord):
    """Requests whose documents stand at one place."""

    type: Literal["placement"] = "placement"  # type: ignore[assignment]


class Placement(Experiment):
    kind = "placement"
    record = PlacementRecord
    cell = PlacementCell
    policies: ClassVar[Any] = ("retrieval", "sorted", *ORDERERS)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: PlacementCell = job.cell
        trace = trace_of_workload(make_workload(cell.workload, job.seed, requests=job.requests), job.requests)
        for policy in job.policies:
            engine = SimEngine(block_size=cell.block_size, capacity_tokens=cell.capacity_tokens, like=SIM_LIKE)
            prompts = PlacedPrompts(cell.documents)
            ordered = make_policy(policy, engine=engine, prompts=prompts, seed=job.seed)
            run = Run(trace, policy, ordered, engine, prompts, seed=job.seed)
            for _ in serve_in_turn(run, engine):
                advance()
            yield {
                "policy": policy,
                "engine": {"name": engine.name, "block_size": engine.block_size, "like": engine.like},
                "warmup": min(job.suite.warmup, job.requests // 2),
                "rows": asdict(run.columns()),
            }
