"""A server of workflows answers as the plain interpreter does, whatever it speculates on and whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples
from support.workflows import Asked, PlainPrompts, ScriptedEngine, compiled, digest, graphs

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.eval.experiments.staging.measuring import clustered
from ragorder.pipelining import AnswerChunk, ContinuousIVF, EngineLoad, StagedIVF
from ragorder.pipelining.search import Budget
from ragorder.pipelining.workflow import (
    CompiledGraph,
    GraphError,
    NodeError,
    RAGraph,
    WorkflowServer,
    hyde,
    interpret,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    Prefetch,
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
)

D, N = 8, 400
SMALL_PIECES = 1e-12


@pytest.fixture(scope="module")
def index() -> Any:
    stored = clustered(N, D, clusters=20, seed=0)
    index = faiss.index_factory(D, "IVF12,Flat")
    index.train(stored)
    index.add(stored)
    index.nprobe = 8
    return index


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture
def search(index: Any) -> Iterator[ContinuousIVF]:
    """One cluster a piece."""
    with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
        yield search


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
        Prefetch(),
    ]


async def settled(server: Any, engine: SlowEngine, search: ContinuousIVF, prompts: PlainPrompts) -> None:
    """Nothing is left running anywhere."""
    assert engine.running == 0 and prompts.open == 0
    for worker in ("engine", "search", "step"):
        assert server.wavefront.count(worker) == 0
    assert server.facts.embedding_ahead == 0 and server.facts.load.pending == 0
    while search.in_flight:
        await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class TestAnswers:
    @pytest.mark.parametrize("make", [one_shot, multistep, irg, hyde, recomp], ids=lambda make: make.__name__)
    @pytest.mark.parametrize("transformations", [None, (), "eager"])
    async def test_the_papers_workflows(
        self, index: Any, search: ContinuousIVF, make: Any, transformations: Any
    ) -> None:
        engine, prompts, graph = SlowEngine(), PlainPrompts(), make().compile()
        chosen = eager() if transformations == "eager" else transformations
        expected = await interpret(graph, "why?", engine=engine, prompts=prompts, retrieve=retriever(index))
        async with WorkflowServer(
            engine, search, vector, document, prompts, transformations=chosen, load=EngineLoad(16)
        ) as server:
            results = await asyncio.gather(*(server.run(graph, "why?") for _ in range(3)))
            assert [result.text for result in results] == [expected.text] * 3
            assert [dict(result.state) for result in results] == [dict(expected.state)] * 3
            await settled(server, engine, search, prompts)

    @settings(max_examples=examples(150))
    @given(graphs(), st.integers(0, 2**32), st.booleans())
    async def test_on_any_graph_they_are_the_interpreters(
        self, index: Any, graph: RAGraph, seed: int, odds: bool
    ) -> None:
        """Loops, conditions, branches that meet; requests side by side that are at different places."""
        runnable = compiled(graph)
        if runnable is None:
            return
        engine, prompts = SlowEngine(), PlainPrompts()
        questions = [f"question {Random(seed).randrange(3)}" for _ in range(3)]
        expected = [await outcome(interpreted(runnable, index, question)) for question in questions]
        with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
            chosen = None if odds else eager()
            async with WorkflowServer(
                engine, search, vector, document, prompts, transformations=chosen, load=EngineLoad(16)
            ) as server:
                runs = (outcome(server.run(runnable, question)) for question in questions)
                assert await asyncio.gather(*runs) == expected
                await settled(server, engine, search, prompts)

    async def test_a_search_without_pieces_is_searched_whole(self, index: Any) -> None:
        engine, prompts, graph = SlowEngine(), PlainPrompts(), irg().compile()
        expected = await interpreted(graph, index, "why?")

        async def ids(vector: Any, k: int) -> Any:
            return index.search(vector[None], k)[1][0]

        for search in (StagedIVF(index), ids, lambda vector, k: index.search(vector[None], k)[1][0]):
            async with WorkflowServer(engine, search, vector, document, prompts) as server:
                assert (await server.run(graph, "why?")).text == expected.text

    async def test_documents_stay_in_rank_order_unless_ordering_pays(self, search: ContinuousIVF) -> None:
        engine, graph = SlowEngine(), one_shot().compile()
        for chosen, ordered in (((), False), ((OrderDocuments(),), True)):
            async with WorkflowServer(
                engine, search, vector, document, PlainPrompts(), transformations=chosen
            ) as server:
                await server.run(graph, "why?")
            assert engine.sent[-1].question.ordered is ordered


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
