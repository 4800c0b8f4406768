"""A server of workflows on the embedded engine: random weights, real tokens, a real cache and a real index."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.workflow_server import N, eager, small_index, vector

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.prompts import OrderedPrompts
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import ContinuousIVF, EngineLoad
from ragorder.pipelining.search import Budget
from ragorder.pipelining.workflow import NodeQuestion, WorkflowServer, hyde, interpret, irg, multistep, one_shot, recomp

SYSTEM = "Answer from the documents. " * 4
DOCUMENTS = [Document(f"document {id}", f"The {id}th document tells of number {id}. " * 2) for id in range(N)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [SYSTEM, *(document.text for document in DOCUMENTS[:20])]
    folder = tmp_path_factory.mktemp("models") / "workflow_server"
    return make_model(folder, texts=texts, layers=1, hidden_size=64, vocab_size=400, max_position_embeddings=2048)


@pytest.fixture
def worker(folder: Path) -> Iterator[EngineWorker]:
    worker = EngineWorker(TieredEngine.load(folder, EngineSettings(device_tokens=8192, dtype="float32", device="cpu")))
    yield worker
    worker.close()


def prompts_for(folder: Path) -> tuple[PromptBuilder, WorkflowPrompts]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    builder = PromptBuilder(SYSTEM, question_template="{query}", tokenizer=tokenizer)
    orderer = Orderer(capacity_tokens=8192, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    return builder, WorkflowPrompts(OrderedPrompts(orderer, builder, "token_ids"))


class Recorded(EmbeddedStreams):
    """Keeps the prompts that it was asked."""

    def __init__(self, worker: EngineWorker) -> None:
        super().__init__(worker)
        self.asked: set[tuple[int, ...]] = set()

    def stream(self, request: Any, /) -> Any:
        self.asked.add(tuple(request.token_ids))
        return super().stream(request)


class Ranked:
    """Keeps the order of rank, which is the same whatever the cache holds."""

    def __init__(self, prompts: WorkflowPrompts) -> None:
        self.prompts = prompts

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> Any:
        return self.prompts.preview(replace(question, ordered=False), documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> Any:
        return self.prompts.commit(replace(question, ordered=False), documents)


GRAPHS = [
    hyde(topk=2, guess_tokens=24, max_tokens=8).compile(),
    irg(rounds=2, topk=2, max_tokens=16).compile(),
    multistep(rounds=2, topk=1, plan_tokens=24, max_tokens=8).compile(),
    one_shot(topk=2, max_tokens=8).compile(),
    recomp(topk=2, each=True, compress_tokens=12, max_tokens=8).compile(),
]


@pytest.mark.parametrize("max_generations", [None, 2])
async def test_documents_prompts_and_answers_are_those_of_the_interpreter_whatever_is_speculated_on(
    folder: Path, worker: EngineWorker, max_generations: int | None
) -> None:
    index = small_index()
    _, ordered = prompts_for(folder)
    plain, engine, prompts = Recorded(worker), Recorded(worker), Ranked(ordered)

    async def retrieve(query: str, topk: int) -> list[Document]:
        return [DOCUMENTS[id] for id in index.search(vector(query)[None], topk)[1][0]]

    expected = [
        await interpret(graph, "Which number?", engine=plain, prompts=prompts, retrieve=retrieve) for graph in GRAPHS
    ]
    with ContinuousIVF(index, cores=1, budget=Budget(1e-12)) as search:
        async with WorkflowServer(
            engine,
            search,
            vector,
            DOCUMENTS.__getitem__,
            prompts,
            transformations=eager(),
            extra_tokens=None,
            load=EngineLoad(8),
            max_generations=max_generations,
        ) as server:
            results = await asyncio.gather(*(server.run(graph, "Which number?") for graph in GRAPHS * 2))
    assert [result.text for result in results] == [result.text for result in expected * 2]
    assert [dict(result.state.items()) for result in results] == [dict(result.state.items()) for result in expected * 2]
    # Speculation asks others as well.
    assert plain.asked <= engine.asked
    assert any(piece.kind == "speculative" for result in results for piece in result.trace.pieces)
    assert worker.unfinished == 0


async def test_a_second_round_finds_the_first_ones_documents_cached(folder: Path, worker: EngineWorker) -> None:
    """The same documents in another order of rank."""
    builder, prompts = prompts_for(folder)
    engine = EmbeddedStreams(worker)
    found = iter(([1, 2, 3], [3, 2, 1]))
    graph = irg(rounds=2, topk=3, max_tokens=8).compile()
    async with WorkflowServer(
        engine, lambda vector, k: next(found), lambda query: query, DOCUMENTS.__getitem__, prompts, memo=False
    ) as server:
        trace = (await server.run(graph, "Which number?")).trace
    first, second = (piece for piece in trace.pieces if piece.worker == "engine")
    documents_end = builder.prefix_tokens + sum(builder.document_tokens(DOCUMENTS[id]) for id in (1, 2, 3))
    assert first.cached_tokens == 0 and second.cached_tokens == documents_end
    assert first.applied == second.applied == ["order_documents"]
