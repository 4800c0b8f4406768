"""Processor time of the workflow server: the suites of kind "wavefront"."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ragorder.eval.data.machine import load_average
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.pipelining import AnswerChunk, EngineLoad, Stage, Usage
from ragorder.pipelining.workflow import NodeQuestion, WorkflowServer, WorkflowTrace, irg

__all__ = ["WavefrontCell", "WavefrontRecord", "WavefrontTime", "make_part", "measure"]


class WavefrontCell(SuiteCell):
    """`requests` of IRG, `in_flight` at a time, whose searches have `stages` and whose answers have `tokens`; measured
    `repeats` times."""

    in_flight: int = Field(100, ge=1)
    requests: int = Field(300, ge=1)
    stages: int = Field(8, ge=1)
    tokens: int = Field(32, ge=1)
    repeats: int = Field(5, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class WavefrontRecord(Record):
    """`rows["ms"]`: processor time a piece, the far ends' taken off. Facts: `pieces` and `speculative` ones among them,
    `cycles`, and what was taken off, `far_ends_ms`."""

    called: ClassVar[str] = "a measurement of the workflow server's time"
    is_run: ClassVar[bool] = False

    type: Literal["wavefront"] = "wavefront"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("ms") or not self.facts.get("pieces"):
            raise ValueError("times or pieces are missing")
        return self

    @property
    def ms(self) -> float:
        return median(self.rows["ms"])


class WavefrontTime(Experiment):
    kind = "wavefront"
    record = WavefrontRecord
    cell = WavefrontCell
    policies: ClassVar[Any] = ("stage by stage", "all")
    unit = "repeats"
    packages: ClassVar[Any] = {"numpy": "retrieval"}
    one_job = True

    def steps(self, job: Job) -> int:
        return len(job.policies) * int(job.cell.repeats)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        """Policies take turns."""

        cell: WavefrontCell = job.cell.model_copy(update={"requests": job.requests})
        load = load_average()
        times: dict[str, list[float]] = {policy: [] for policy in job.policies}
        facts: dict[str, Any] = {}
        for _ in range(cell.repeats):
            for policy in job.policies:
                ms, facts[policy] = asyncio.run(measure(cell, transformed=policy == "all"))
                times[policy].append(round(ms, 5))
                advance()
        for policy in job.policies:
            rows = {"ms": times[policy]}
            yield {
                "policy": policy,
                "engine": {"name": "played"},
                "load_average": load,
                "facts": facts[policy],
                "rows": rows,
            }


_ROUNDS = 3


@dataclass(frozen=True)
class _Request:
    question: NodeQuestion
    documents: tuple[str, ...]
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class _Committed:
    request: _Request

    def confirm(self, usage: Usage | None, /) -> None: ...

    def discard(self) -> None: ...


class _Prompts:
    def preview(self, question: NodeQuestion, documents: Sequence[str], /) -> _Request:
        return _Request(question, tuple(documents))

    def commit(self, question: NodeQuestion, documents: Sequence[str], /) -> _Committed:
        return _Committed(self.preview(question, documents))


class _Engine:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def stream(self, request: _Request | None, /) -> AsyncGenerator[AnswerChunk, None]:
        for number in range(self._tokens):
            await asyncio.sleep(0)
            yield AnswerChunk(f"word{number} ")
        yield AnswerChunk("", Usage(100, 0, self._tokens))


class _Handle:
    """The result changes halfway."""

    stage: Stage | None = None

    def __init__(self, stages: int) -> None:
        self._stages = stages

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        return False

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        for number in range(1, self._stages + 1):
            await asyncio.sleep(0)
            ids = np.array([[1, 2, 3 + (2 * number > self._stages)]])
            yield Stage(number, self._stages, ids, np.ones(ids.shape, np.float32))


class _Search:
    def __init__(self, stages: int) -> None:
        self._stages = stages

    def submit(self, vector: Any, k: int, **_: Any) -> _Handle:
        return _Handle(self._stages)


async def _embed(query: str) -> Any:
    await asyncio.sleep(0)
    return np.ones(8, np.float32)


async def measure(cell: WavefrontCell, *, transformed: bool) -> tuple[float, dict[str, Any]]:
    """Milliseconds a piece, and facts. The first third of the requests is not counted."""
    traces: list[WorkflowTrace] = []
    engine, search = _Engine(cell.tokens), _Search(cell.stages)
    async with WorkflowServer(
        engine,
        search,
        _embed,
        str,
        _Prompts(),
        transformations=None if transformed else (),
        load=EngineLoad(16),
        max_requests=cell.in_flight,
        max_waiting=cell.requests,
        observer=traces.append,
    ) as server:
        graph = irg(rounds=_ROUNDS).compile()

        async def run(requests: int) -> None:
            await asyncio.gather(*(server.run(graph, f"question {number}") for number in range(requests)))

        await run(cell.requests // 3)
        traces.clear()
        cycles, began_s = server.cycles, time.process_time()
        await run(cell.requests)
        ended_s = time.process_time()
        cycles = server.cycles - cycles
    pieces = [piece for trace in traces for piece in trace.pieces]
    bare_s = await _bare(cell, engine)
    facts = {
        "pieces": len(pieces),
        "speculative": sum(piece.kind == "speculative" for piece in pieces),
        "cycles": cycles,
        "far_ends_ms": 1000 * bare_s / len(pieces),
    }
    return 1000 * (ended_s - began_s - bare_s) / len(pieces), facts


async def _bare(cell: WavefrontCell, engine: _Engine) -> float:
    """Seconds of the same answers without a server."""
    turns = asyncio.Semaphore(cell.in_flight)

    async def request() -> None:
        async with turns:
            for _ in range(_ROUNDS):
                await _embed("")
                async for _ in _Handle(cell.stages).stages_async():
                    pass
                async for _ in engine.stream(None):
                    pass

    began_s = time.process_time()
    await asyncio.gather(*(request() for _ in range(cell.requests)))
    return time.process_time() - began_s


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group_runs(results.of(WavefrontRecord, suite.name)))])


def _table(groups: list[RecordGroup[WavefrontRecord]]) -> Table:
    headings = ["requests in flight", "transformations", "ms a piece", "least", "most", "speculative", "cycles a piece"]
    table = Table("Processor time of scheduling", headings, labels=2)
    for group in groups:
        for line in group.runs():
            facts, times = line.facts, line.rows["ms"]
            table.add(
                str(group.cell.get("in_flight", 100)),
                line.policy,
                *(format_number(ms, 3) for ms in (line.ms, min(times), max(times))),
                f"{format_number(100 * facts['speculative'] / facts['pieces'])} %",
                format_number(facts["cycles"] / facts["pieces"], 2),
            )
    table.note = "Median, least and most of the repeats; the time of engine, search and embedder is taken off."
    return table
