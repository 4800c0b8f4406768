"""Workflows for frameworks and engines: ordered prompts, a shared server, LangGraph, LangChain, Haystack, streams."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypedDict

import pytest
from support.workflows import PlainPrompts, ScriptedEngine

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest
from ragorder.adapters.workflows import SharedWorkflows, WorkflowPrompts
from ragorder.pipelining import AnswerChunk, Usage
from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    NodeError,
    NodeQuestion,
    RAGraph,
    WorkflowResult,
    hyde,
    interpret,
    irg,
    one_shot,
)

DOCUMENTS = [Document(name, f"{name} is a document about {name}. " * 8, metadata={"of": name}) for name in "abcdef"]
SYSTEM = "Answer from the documents. " * 8


async def retrieve(query: str, topk: int) -> Sequence[Document]:
    """Those whose names the query has, then the others."""
    return sorted(DOCUMENTS, key=lambda document: document.id not in query.split())[:topk]


def parts(**options: Any) -> tuple[Orderer, WorkflowPrompts]:
    builder = PromptBuilder(SYSTEM, question_template="{query}", tokenizer=options.pop("tokenizer", None))
    orderer = Orderer(capacity_tokens=4096, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    return orderer, WorkflowPrompts(OrderedPrompts(orderer, builder, **options))


def shown(request: PromptRequest) -> str:
    """Names of the documents in their order."""
    assert request.messages is not None
    return "".join(re.findall(r"^\[(.)\]$", request.messages[-1]["content"], re.MULTILINE))


class TestPrompts:
    def test_documents_are_put_where_the_cache_has_them(self) -> None:
        _, prompts = parts()
        a, b, c, d = DOCUMENTS[:4]
        first = prompts.commit(NodeQuestion("What is it?"), [a, b, c])
        first.confirm(None)
        second = prompts.commit(NodeQuestion("And then?"), [d, c, b, a])
        assert (shown(first.request), shown(second.request)) == ("abc", "abcd")
        second.discard()

    def test_a_preview_is_what_commit_sends(self) -> None:
        _, prompts = parts()
        prompts.commit(NodeQuestion("first"), DOCUMENTS[:3]).confirm(None)
        question = NodeQuestion("second", "tenant", 7, 0.5, {"stop": ["."]})
        assert prompts.preview(question, DOCUMENTS[4::-1]) == prompts.commit(question, DOCUMENTS[4::-1]).request

    def test_in_the_order_of_rank_the_orderer_sees_nothing(self) -> None:
        orderer, prompts = parts()
        prompts.commit(NodeQuestion("first"), DOCUMENTS[:3]).confirm(None)
        size = orderer.tree_size
        question = NodeQuestion("second", ordered=False)
        committed = prompts.commit(question, DOCUMENTS[3::-1])
        committed.confirm(None)
        assert shown(committed.request) == "dcba"
        assert prompts.preview(question, DOCUMENTS[3::-1]) == committed.request
        assert orderer.tree_size == size

    def test_all_generations_share_the_system_prompt(self) -> None:
        _, prompts = parts()
        without, with_documents = (prompts.preview(NodeQuestion("Plan."), each) for each in ([], DOCUMENTS[:2]))
        assert without.messages is not None and with_documents.messages is not None
        assert without.messages[0] == with_documents.messages[0] == {"role": "system", "content": SYSTEM}
        assert without.messages[1] == {"role": "user", "content": "Plan."}

    def test_options_reach_the_engine(self) -> None:
        _, prompts = parts()
        request = prompts.preview(NodeQuestion("Plan.", "tenant", 7, 0.5, {"stop": ["."]}), [])
        assert request.scope == "tenant"
        assert request.options == {"stop": ["."], "max_tokens": 7, "temperature": 0.5}


class PlainServer:
    """Runs workflows stage by stage."""

    def __init__(self, answer: str = "the answer") -> None:
        self.engine = ScriptedEngine(lambda asked: answer)
        self.scopes: list[Hashable] = []
        self.closed = False
        self.started = asyncio.Event()
        self.free = asyncio.Event()
        self.free.set()

    async def run(
        self, graph: CompiledGraph, question: str, *, state: Mapping[str, Any] | None = None, scope: Hashable = None
    ) -> WorkflowResult:
        self.scopes.append(scope)
        self.started.set()
        await self.free.wait()
        return await interpret(
            graph, question, engine=self.engine, prompts=PlainPrompts(), retrieve=retrieve, state=state, scope=scope
        )

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def workflows() -> Iterator[SharedWorkflows]:
    with SharedWorkflows(PlainServer) as shared:
        yield shared


class TestShared:
    def test_is_closed_with_its_server(self) -> None:
        servers: list[PlainServer] = []

        def make() -> PlainServer:
            servers.append(PlainServer())
            return servers[0]

        with SharedWorkflows(make) as shared:
            assert shared.run(one_shot().compile(), "a").text == "the answer"
            assert not servers[0].closed
        assert servers[0].closed
        shared.close()
        with pytest.raises(RuntimeError, match="the shared workflow server is closed"):
            shared.run(one_shot().compile(), "a")

    async def test_serves_another_event_loop_and_is_cancelled_from_it(self) -> None:
        servers: list[PlainServer] = []

        def make() -> PlainServer:
            servers.append(PlainServer())
            servers[0].free.clear()
            return servers[0]

        shared = SharedWorkflows(make)
        try:
            running = asyncio.create_task(shared.arun(one_shot().compile(), "a"))
            await asyncio.to_thread(shared._thread.run, servers[0].started.wait())
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert servers[0].engine.sent == []
        finally:
            await asyncio.to_thread(shared.close)

    def test_an_error_comes_through(self, workflows: SharedWorkflows) -> None:
        graph = RAGraph("broken").add_generation("a", prompt=lambda state: state["missing"])
        graph.add_edge(START, "a").add_edge("a", END)
        with pytest.raises(NodeError, match="workflow 'broken', node 'a': the state has no 'missing'"):
            workflows.run(graph.compile(), "question")

    def test_does_not_wait_for_itself(self) -> None:
        class Reentrant(PlainServer):
            async def run(self, *args: Any, **options: Any) -> WorkflowResult:
                return shared.run(one_shot().compile(), "a")

        with SharedWorkflows(Reentrant) as shared, pytest.raises(RuntimeError, match="would wait for itself"):
            shared.run(one_shot().compile(), "a")

    def test_a_server_that_cannot_be_made_leaves_no_thread(self) -> None:
        before = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            SharedWorkflows(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        assert threading.active_count() == before


class TestLangGraph:
    def test_a_node(self, workflows: SharedWorkflows) -> None:
        graphs = pytest.importorskip("langgraph.graph")
        from ragorder.adapters.workflows.langgraph import workflow_node

        class Asked(TypedDict, total=False):
            question: str
            answer: str
            found: list[str]

        def update(result: WorkflowResult) -> dict[str, Any]:
            return {"found": [document.id for document in result.state["docs"]]}

        builder = graphs.StateGraph(Asked)
        builder.add_node("answer", workflow_node(workflows, hyde().compile()))
        again = workflow_node(
            workflows, one_shot(topk=2).compile(), question=lambda state: f"{state['answer']} d", answer=update
        )
        builder.add_node("again", again)
        builder.add_edge(graphs.START, "answer")
        builder.add_edge("answer", "again")
        builder.add_edge("again", graphs.END)
        app = builder.compile()
        expected = {"question": "b", "answer": "the answer", "found": ["d", "a"]}
        assert app.invoke({"question": "b"}) == expected
        assert asyncio.run(app.ainvoke({"question": "b"})) == expected

    def test_inputs_and_scope_come_from_the_state(self) -> None:
        pytest.importorskip("langchain_core")
        from ragorder.adapters.workflows.langgraph import workflow_node

        graph = RAGraph("styled", inputs=["style"]).add_generation("a", prompt="{query} in {style}")
        server = PlainServer()
        with SharedWorkflows(lambda: server) as workflows:
            node = workflow_node(
                workflows,
                graph.add_edge(START, "a").add_edge("a", END).compile(),
                inputs=["style"],
                scope=lambda state: state["tenant"],
            )
            node.invoke({"question": "What?", "style": "verse", "tenant": "t"})
            with pytest.raises(KeyError, match="style"):
                node.invoke({"question": "What?", "tenant": "t"})
        assert [asked.question.text for asked in server.engine.sent] == ["What? in verse"]
        assert server.scopes == ["t"]


class TestLangChain:
    def test_a_retriever(self, workflows: SharedWorkflows) -> None:
        pytest.importorskip("langchain_core")
        from ragorder.adapters.workflows.langchain import WorkflowRetriever

        retriever = WorkflowRetriever(workflows=workflows, graph=one_shot(topk=2).compile())
        for found in (retriever.invoke("c"), asyncio.run(retriever.ainvoke("c"))):
            assert [(each.id, each.page_content, each.metadata) for each in found] == [
                (document.id, document.text, document.metadata) for document in (DOCUMENTS[2], DOCUMENTS[0])
            ]

    def test_converts_other_documents(self, workflows: SharedWorkflows) -> None:
        documents = pytest.importorskip("langchain_core.documents")
        from ragorder.adapters.workflows.langchain import WorkflowRetriever

        retriever = WorkflowRetriever(
            workflows=workflows,
            graph=one_shot(topk=1).compile(),
            convert=lambda document: documents.Document(f"<{document.id}>"),
        )
        assert [each.page_content for each in retriever.invoke("e")] == ["<e>"]


class TestHaystack:
    def test_a_component(self, workflows: SharedWorkflows) -> None:
        haystack = pytest.importorskip("haystack")
        from ragorder.adapters.workflows.haystack import WorkflowComponent

        component = WorkflowComponent(workflows, irg(topk=2, rounds=2).compile(), scope="tenant")
        pipeline = haystack.Pipeline()
        pipeline.add_component("research", component)
        outputs = (pipeline.run({"research": {"query": "f"}})["research"], asyncio.run(component.run_async("f")))
        for output in outputs:
            assert output["replies"] == ["the answer"]
            assert [(each.id, each.content, each.meta) for each in output["documents"]] == [
                (document.id, document.text, document.metadata) for document in (DOCUMENTS[5], DOCUMENTS[0])
            ]

    def test_is_not_serialised(self, workflows: SharedWorkflows) -> None:
        pytest.importorskip("haystack")
        from haystack.core.errors import SerializationError

        from ragorder.adapters.workflows.haystack import WorkflowComponent

        with pytest.raises(SerializationError, match="a server in this process"):
            WorkflowComponent(workflows, one_shot().compile()).to_dict()


@pytest.mark.merge
class TestEmbeddedEngine:
    """A real engine with random weights: speed and tokens are real, answers are not."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from ragorder.kernels.random_model import make_model

        texts = [SYSTEM, *(document.text for document in DOCUMENTS)]
        folder = tmp_path_factory.mktemp("models") / "workflows"
        return make_model(folder, texts=texts, layers=1, hidden_size=64, vocab_size=400, max_position_embeddings=2048)

    @pytest.fixture
    def worker(self, folder: Path) -> Iterator[Any]:
        from ragorder.adapters.embedded import EngineWorker
        from ragorder.kernels.engine import EngineSettings, TieredEngine

        settings = EngineSettings(device_tokens=4096, dtype="float32", device="cpu")
        worker = EngineWorker(TieredEngine.load(folder, settings))
        yield worker
        worker.close()

    @pytest.fixture
    def tokenizer(self, folder: Path) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    async def test_rounds_and_generations_without_documents_find_what_they_share(
        self, worker: Any, tokenizer: Any
    ) -> None:
        from ragorder.adapters.embedded import EmbeddedStreams

        builder = PromptBuilder(SYSTEM, question_template="{query}", tokenizer=tokenizer)
        streams = EmbeddedStreams(worker)
        usages: list[Usage] = []

        class Watched:
            async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
                async with aclosing(streams.stream(request)) as chunks:
                    async for chunk in chunks:
                        if chunk.usage is not None:
                            usages.append(chunk.usage)
                        yield chunk

        _, prompts = parts(tokenizer=tokenizer, prompts="token_ids")
        for graph in (hyde(guess_tokens=8, max_tokens=8), irg(rounds=2, topk=3, max_tokens=8)):
            result = await interpret(
                graph.compile(), "What is a b c?", engine=Watched(), prompts=prompts, retrieve=retrieve
            )
            assert isinstance(result.text, str)
        guess, answer, first, second = usages
        assert guess.cached_tokens == 0
        assert answer.cached_tokens == builder.prefix_tokens
        assert first.prompt_tokens is not None and second.cached_tokens is not None
        documents_end = builder.prefix_tokens + sum(builder.document_tokens(document) for document in DOCUMENTS[:3])
        assert second.cached_tokens == documents_end
        assert worker.unfinished == streams.requests() == 0

    async def test_closing_a_stream_aborts_its_request(self, worker: Any, tokenizer: Any) -> None:
        from ragorder.adapters.embedded import EmbeddedStreams

        _, prompts = parts(tokenizer=tokenizer, prompts="token_ids")
        streams = EmbeddedStreams(worker)
        request = prompts.preview(NodeQuestion("Go on.", max_tokens=1000), DOCUMENTS)
        async with aclosing(streams.stream(request)) as chunks:
            await anext(chunks)
            assert streams.requests() == 1
        assert streams.requests() == 0

    async def test_refuses_what_it_cannot_take(self, worker: Any, tokenizer: Any) -> None:
        from ragorder.adapters.embedded import EmbeddedStreams

        streams = EmbeddedStreams(worker)
        _, prompts = parts()
        with pytest.raises(ValueError, match="takes token ids"):
            await anext(streams.stream(prompts.preview(NodeQuestion("Go on."), [])))
        _, prompts = parts(tokenizer=tokenizer, prompts="token_ids")
        with pytest.raises(TypeError, match="presence_penalty"):
            request = prompts.preview(NodeQuestion("Go on.", options={"presence_penalty": 1}), [])
            await anext(streams.stream(request))
