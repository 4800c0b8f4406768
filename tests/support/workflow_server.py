"""A server of workflows on a small real index, with an engine that can be looked at, and searches that are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import faiss
import numpy as np

from ragorder.pipelining import AnswerChunk, ContinuousIVF, EngineLoad, Stage
from ragorder.pipelining.workflow import CompiledGraph, GraphError, NodeError, NodeQuestion, WorkflowServer, interpret
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
)
from support.ivf import clustered
from support.workflows import Asked, PlainPrompts, ScriptedEngine, digest

D, N = 8, 400
SMALL_PIECES = 1e-12


def small_index() -> Any:
    stored = clustered(N, 0, D, clusters=20)
    index = faiss.index_factory(D, "IVF10,Flat")
    index.train(stored)
    index.add(stored)
    index.nprobe = 8
    return index


def vector(query: str) -> Any:
    """The same text, the same vector; texts that begin alike are near each other."""
    near = np.random.default_rng(digest(query[:4])).normal(size=D)
    return (3 * near + np.random.default_rng(digest(query)).normal(size=D)).astype(np.float32)


def document(id: int) -> str:
    return f"document {id}"


def retriever(index: Any) -> Callable[[str, int], Any]:
    async def retrieve(query: str, topk: int) -> list[str]:
        return [document(id) for id in index.search(vector(query)[None], topk)[1][0].tolist()]

    return retrieve


def long_answer(request: Asked) -> str:
    """Twenty words that depend on the whole request, the last ones alone on the documents."""
    text, shown = digest(request.question.text), digest((request.question.text, request.documents))
    return " ".join([f"w{text:x}"] * 16 + [f"d{shown:x}"] * 4)


def question(number: int = 0) -> NodeQuestion:
    return NodeQuestion(f"question {number}")


def embed(questions: Sequence[NodeQuestion]) -> Any:
    return np.stack([vector(each.text) for each in questions])


def answer_of(index: Any, asked: NodeQuestion, top_k: int = 3) -> tuple[list[str], str]:
    """The documents that FAISS finds, and the engine's answer."""
    found = [document(id) for id in index.search(vector(asked.text)[None], top_k)[1][0].tolist()]
    return found, long_answer(Asked(asked, tuple(found)))


class SlowEngine(ScriptedEngine):
    """Gives way between two words, so that searches and generations overlap; knows what runs."""

    def __init__(self, answer: Callable[[Asked], str] = long_answer, *, pause_s: float = 0.0) -> None:
        super().__init__(answer)
        self.pause_s = pause_s
        self.running = 0

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        self.running += 1
        try:
            await asyncio.sleep(self.pause_s)
            async for chunk in super().stream(request):
                yield chunk
                await asyncio.sleep(self.pause_s)
        finally:
            self.running -= 1


def eager() -> list[Any]:
    """Speculates wherever it can."""
    return [
        SpeculateGeneration(odds=False),
        SpeculateRetrieval(every=1, embeddings=8),
        Split(),
        Reorder(),
        OrderDocuments(),
    ]


def asking(server: Any, *numbers: int) -> list[asyncio.Task[Any]]:
    """Requests for these questions that have begun."""
    return [asyncio.create_task(server.run(question(number))) for number in numbers]


async def settled(server: Any, engine: SlowEngine, search: ContinuousIVF, prompts: PlainPrompts) -> None:
    """Nothing is left running anywhere."""
    assert engine.running == 0 and prompts.open == 0
    for worker in ("engine", "search", "step"):
        assert server.wavefront.count(worker) == 0
    assert server.measurements.speculative_embeddings == 0 and server.measurements.load.pending == 0
    while search.in_flight:
        await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def interpreted(graph: CompiledGraph, index: Any, question: str) -> Any:
    return await interpret(
        graph, question, engine=ScriptedEngine(long_answer), prompts=PlainPrompts(), retrieve=retriever(index)
    )


async def outcome(run: Any) -> Any:
    """What can be compared of a result, or of an error."""
    try:
        result = await run
    except (NodeError, GraphError) as error:
        return type(error), str(error)
    return result.text, dict(result.state)


class PlayedHandle:
    """A search whose stages come when `next` is called."""

    stage: Any = None

    def __init__(self, stages: Sequence[Sequence[int]]) -> None:
        self._left = list(stages)
        self._count = len(stages)
        self._stages: asyncio.Queue[Stage] = asyncio.Queue()

    def next(self, distance: float = 1.0) -> None:
        if self._left:
            ids = np.array([self._left.pop(0)])
            number = self._count - len(self._left)
            self._stages.put_nowait(Stage(number, self._count, ids, np.full(ids.shape, distance, np.float32)))

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        while True:
            yield await self._stages.get()

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        return False


class PlayedSearch:
    def __init__(self, *stages: Sequence[int]) -> None:
        self.stages = stages
        self.handles: list[PlayedHandle] = []

    def submit(self, vector: Any, k: int, **_: Any) -> PlayedHandle:
        self.handles.append(PlayedHandle(self.stages))
        return self.handles[-1]

    def next(self) -> None:
        for handle in self.handles:
            handle.next()

    async def play(self, *runs: asyncio.Task[Any], pause_s: float = 0.0) -> None:
        """Show stage after stage until all runs have ended."""
        while not all(run.done() for run in runs):
            self.next()
            await asyncio.sleep(pause_s)


def server_of(
    search: Any, engine: Any = None, prompts: Any = None, transformations: Any = None, **options: Any
) -> WorkflowServer[Any, Any]:
    """A server that finds `document`s by `vector`s, and may speculate from its first request on."""
    return WorkflowServer(
        engine or SlowEngine(),
        search,
        vector,
        document,
        prompts or PlainPrompts(),
        transformations=transformations,
        **{"extra_tokens": None} | options,
    )


def eager_server(
    engine: Any, search: Any, embed: Any = vector, found: Any = document, prompts: Any = None, **options: Any
) -> WorkflowServer[Any, Any]:
    """A server that speculates wherever it can; `search` may be a function of a text, without `embed` and `found`."""
    options = {"transformations": eager(), "extra_tokens": None, "load": EngineLoad(16)} | options
    return WorkflowServer(engine, search, embed, found, prompts or PlainPrompts(), **options)


def played_server(
    engine: SlowEngine, search: PlayedSearch, *transformations: Any, **options: Any
) -> WorkflowServer[Any, Any]:
    async def embedded(query: str) -> Any:
        return vector(query)

    chosen = transformations or (SpeculateGeneration(odds=False), Split())
    return eager_server(engine, search, embedded, transformations=chosen, **options)


class InjectedError(Exception):
    """Its message is a secret."""


def broken(*_: Any) -> Any:
    raise InjectedError("a secret")
