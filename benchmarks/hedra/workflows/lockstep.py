"""Stage by stage: each request by itself, or in batches whose stages begin together, as a framework's `batch` runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from ragorder.document import Document
from ragorder.pipelining import AnswerChunk, EngineRequest, RequestBuilder, StreamingEngine
from ragorder.pipelining.workflow import CompiledGraph, NodeQuestion, WorkflowResult, interpret

__all__ = ["Lockstep", "Retrieve", "Stages", "stage_by_stage"]

R = TypeVar("R", bound=EngineRequest)
T = TypeVar("T")

Retrieve = Callable[[str, int], Awaitable[Sequence[Document]]]


class Stages:
    """A barrier in front of each stage of a batch's requests, for those that have not ended."""

    def __init__(self, requests: int) -> None:
        self._running = requests
        self._reached: list[asyncio.Future[None]] = []

    async def reach(self) -> None:
        reached = asyncio.get_running_loop().create_future()
        self._reached.append(reached)
        self._release()
        await reached

    def leave(self) -> None:
        self._running -= 1
        self._release()

    def engine(self, engine: StreamingEngine[R]) -> StreamingEngine[R]:
        return _StagedEngine(engine, self)

    def _release(self) -> None:
        if len(self._reached) == self._running:
            for reached in self._reached:
                reached.set_result(None)
            self._reached = []


class Lockstep:
    """Runs requests in batches of at most `limit`: what comes during one is in the next."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[Stages]] = deque()
        self._running = 0

    async def run(self, request: Callable[[Stages], Awaitable[T]]) -> T:
        turn: asyncio.Future[Stages] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._begin()
        stages = await turn
        try:
            return await request(stages)
        finally:
            stages.leave()
            self._running -= 1
            self._begin()

    def _begin(self) -> None:
        if self._running:
            return
        self._running = min(self._limit, len(self._waiting))
        stages = Stages(self._running)
        for _ in range(self._running):
            self._waiting.popleft().set_result(stages)


class _StagedEngine(Generic[R]):
    def __init__(self, engine: StreamingEngine[R], stages: Stages) -> None:
        self._engine = engine
        self._stages = stages

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        await self._stages.reach()
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def stage_by_stage(
    engine: StreamingEngine[R],
    prompts: RequestBuilder[NodeQuestion, Document, R],
    retrieve: Retrieve,
    *,
    lockstep: int | None = None,
) -> Callable[..., Awaitable[WorkflowResult]]:
    """A `run` like a WorkflowServer's. `lockstep`: in batches of at most so many."""
    batches = Lockstep(lockstep) if lockstep else None

    async def run(graph: CompiledGraph, question: str, *, state: Mapping[str, Any]) -> WorkflowResult:
        if batches is None:
            return await interpret(graph, question, engine=engine, prompts=prompts, retrieve=retrieve, state=state)

        async def in_step(stages: Stages) -> WorkflowResult:
            async def retrieve_in_step(query: str, k: int) -> Sequence[Document]:
                await stages.reach()
                return await retrieve(query, k)

            staged = stages.engine(engine)
            return await interpret(
                graph, question, engine=staged, prompts=prompts, retrieve=retrieve_in_step, state=state
            )

        return await batches.run(in_step)

    return run
