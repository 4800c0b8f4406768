"""Processor time of the workflow server beside engine, search and embedder that take none (suite hedra-overhead)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.common.turns import InTurns, ms_columns
from ragorder.eval.report.declared import Column, TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.suite import Job, Line
from ragorder.pipelining import AnswerChunk, EngineLoad, Stage, Usage
from ragorder.pipelining.workflow import NodeQuestion, WorkflowServer, WorkflowTrace, irg

_ROUNDS = 3


class WavefrontCell(SeedlessCell):
    """`requests` of IRG, `in_flight` at a time, with `stages` a search and `tokens` an answer."""

    in_flight: int = Field(100, ge=1)
    requests: int = Field(300, ge=1)
    stages: int = Field(8, ge=1)
    tokens: int = Field(32, ge=1)
    repeats: int = Field(5, ge=1)


class WavefrontTime(InTurns):
    """Column `ms`: processor time a piece, less the far ends', which is a fact as counts of pieces are."""

    kind = "wavefront"
    cell = WavefrontCell
    facts = ("pieces",)
    policies: ClassVar[Any] = ("stage by stage", "all")
    packages: ClassVar[Any] = {"numpy": "retrieval"}
    tables = (
        TableForm(
            "Processor time of scheduling",
            [
                Column("requests in flight", lambda row: str(row.cell.in_flight)),
                policy_column("transformations"),
                *ms_columns("piece", 3),
                Column("speculative", lambda row: f"{format_number(row.mean(_speculative))} %"),
                figure("cycles a piece", lambda run: run.facts["cycles"] / run.facts["pieces"], 2),
            ],
            note="Median, least and most of the repeats; the time of engine, search and embedder is taken off.",
            labels=2,
            by=(),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: WavefrontCell = job.cell.model_copy(update={"requests": job.requests})
        return self.in_turns(job, advance, lambda policy: asyncio.run(measure(cell, transformed=policy == "all")))


def _speculative(run: Any) -> float:
    """In per cent."""
    return float(100 * run.facts["speculative"] / run.facts["pieces"])


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
        import numpy as np

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
    import numpy as np

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
        memo=False,
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
