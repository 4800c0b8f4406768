"""Processes with an orderer each, which share an engine and their orders (simulated)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field

from ragorder import Document, Ordering
from ragorder.benchmarks.common.served import cached_share
from ragorder.benchmarks.fleet.replicas import BLOCK_SIZE, KEPT_TOKENS, make_engine, make_orderer
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.report.declared import Column, Row, TableForm, figure, policy_column, ratio
from ragorder.eval.report.tables import Tone
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_OWN = "own orders"
_SHARED = "shared orders"
_ENOUGH = 90.0


class SharingCell(SuiteCell):
    """`processes` share an engine; the others know an order `late` requests after the next one."""

    processes: int = Field(4, ge=1)
    workload: str
    capacity_tokens: int = Field(32_768, ge=1)
    in_flight: int = Field(16, ge=1)
    requests: int = Field(2000, ge=1)
    late: int = Field(0, ge=0)


def _exact(run: Record) -> float:
    """The share of the predictions that are right to the block."""
    pairs = list(zip(run.rows["cached_tokens"], run.rows["predicted_tokens"], strict=True))
    right: int = sum(abs(cached - predicted) < run.block_size for cached, predicted in pairs)
    return right / max(1, len(pairs))


def _late(row: Row) -> str:
    if row.policy != _SHARED:
        return "–"
    return f"{row.cell.late} requests later" if row.cell.late else "with the next request"


def _of_one_process(row: Row) -> float | None:
    one = [cached_share(run) for group in row.block.groups if group.cell["processes"] == 1 for run in group.runs(_OWN)]
    return fmean(one) if one else None


def _reached(row: Row, share: float) -> Tone:
    if row.policy != _SHARED or row.cell.late:
        return ""
    return "good" if share >= _ENOUGH else "bad"


class Sharing(Experiment):
    """Rows are of each request after the warm-up."""

    kind = "sharing"
    cell = SharingCell
    columns = ("prompt_tokens", "cached_tokens", "predicted_tokens")
    policies: ClassVar[Any] = (_OWN, _SHARED)
    simulated = True
    tables: ClassVar[Any] = [
        TableForm(
            "{cell.workload}: processes with one engine",
            [
                Column("processes", lambda row: str(row.cell.processes)),
                policy_column("orders"),
                Column("known to the others", _late),
                figure("cached, %", cached_share, scale=100, spread=True),
                ratio("of one process, %", cached_share, _of_one_process, 1, scale=100, tone=_reached),
                figure("exact, %", _exact, scale=100),
            ],
            note="Mean of {seeds} seeds (in brackets their range).",
            labels=3,
            by=("workload",),
            sort=("processes",),
        )
    ]

    def applies(self, suite: Suite, cell: SharingCell, policy: str) -> bool:
        """With nothing shared it does not matter how late."""
        return not cell.late or (policy == _SHARED and cell.processes > 1)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: SharingCell = job.cell
        workload = make_workload(cell.workload, job.seed, requests=job.requests)
        requests = trace_of_workload(workload, job.requests).requests
        warmup = min(job.suite.warmup, len(requests) // 4)
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "sim", "block_size": BLOCK_SIZE},
                "rows": serve(requests, cell, job.seed, warmup, advance, shared=policy == _SHARED),
            }


def serve(
    requests: Sequence[TraceRequest],
    cell: SharingCell,
    seed: int,
    warmup: int,
    advance: Callable[[], None] = lambda: None,
    *,
    shared: bool,
) -> dict[str, list[int]]:
    """Columns of the record. A request ends when `in_flight` others have begun."""
    prompts, rng = NumberedPrompts(), random.Random(seed)
    engine = make_engine(cell.capacity_tokens)
    orderers = [make_orderer(cell.capacity_tokens, prompts) for _ in range(cell.processes)]
    # Orders, by the place in the trace at which the other processes get them.
    log: deque[tuple[int, int, TraceRequest, Sequence[int]]] = deque()
    running: deque[tuple[Ordering[Document], int, EngineCompletion]] = deque()
    rows: dict[str, list[int]] = {"prompt_tokens": [], "cached_tokens": [], "predicted_tokens": []}
    for place, request in enumerate(requests):
        while log and log[0][0] <= place:
            _, origin, ordered, permutation = log.popleft()
            for process, orderer in enumerate(orderers):
                if process != origin:
                    orderer.record(ordered.documents, permutation=permutation)
        process = rng.randrange(cell.processes)
        ordering = orderers[process].order(request.documents)
        if shared:
            log.append((place + 1 + cell.late, process, request, ordering.permutation))
        done, handle = engine.admit(prompts.token_ids(place, request, ordering.documents), KEPT_TOKENS)
        running.append((ordering, handle, done))
        if len(running) > cell.in_flight:
            first, handle, served = running.popleft()
            engine.finish(handle)
            first.confirm(served.cached_tokens, served.prompt_tokens + KEPT_TOKENS + 1)
        if place >= warmup:
            rows["prompt_tokens"].append(done.prompt_tokens)
            rows["cached_tokens"].append(done.cached_tokens)
            rows["predicted_tokens"].append(ordering.cached_tokens)
        advance()
    return rows
