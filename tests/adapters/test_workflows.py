"""Workflows for frameworks and engines: ordered prompts, a shared server, LangGraph, LangChain, Haystack, streams."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict

import pytest
from support.chat_server import ChatServer, chat_server
from support.workflows import PlainPrompts, ScriptedEngine

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest
from ragorder.adapters.workflows import (
    OrderedWorkflows,
    SharedWorkflows,
    TraceLog,
    WorkflowMetrics,
    WorkflowPrompts,
    WorkflowTracing,
    ordered_workflows,
)
from ragorder.pipelining import AnswerChunk, ContinuousIVF, Usage
from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    NodeError,
    NodeQuestion,
    RAGraph,
    WorkflowResult,
    WorkflowTrace,
    hyde,
    interpret,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ragorder.pipelining.workflow.transformations import OrderDocuments, SpeculateRetrieval

DOCUMENTS = [Document(name, f"{name} is a document about {name}. " * 8, metadata={"of": name}) for name in "abcdef"]
SYSTEM = "Answer from the documents. " * 8


async def retrieve(query: str, topk: int) -> Sequence[Document]:
    """Those whose names the query has, then the others."""
    return sorted(DOCUMENTS, key=lambda document: document.id not in query.split())[:topk]


def ordered(tokenizer: Any = None) -> tuple[Orderer, PromptBuilder]:
    builder = PromptBuilder(SYSTEM, question_template="{query}", tokenizer=tokenizer)
    return Orderer(capacity_tokens=4096, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens), builder


def parts(tokenizer: Any = None, **options: Any) -> tuple[Orderer, WorkflowPrompts]:
    orderer, builder = ordered(tokenizer)
    return orderer, WorkflowPrompts(OrderedPrompts(orderer, builder, **options))


def shown(request: PromptRequest) -> str:
    """Names of the documents in their order."""
    assert request.messages is not None
    return "".join(re.findall(r"^\[(.)\]$", request.messages[-1]["content"], re.MULTILINE))


class TestPrompts:
    def test_a_preview_is_what_commit_sends(self) -> None:
        _, prompts = parts()
        prompts.commit(NodeQuestion("first"), DOCUMENTS[:3]).confirm(None)
        question = NodeQuestion("second", "tenant", 7, 0.5, {"stop": ["."]})
        request = prompts.preview(question, DOCUMENTS[4::-1])
        assert request == prompts.commit(question, DOCUMENTS[4::-1]).request
        assert request.scope == "tenant"
        assert request.options == {"stop": ["."], "max_tokens": 7, "temperature": 0.5}

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

    def test_lengths_of_all_that_are_sent_are_learnt_in_either_order(self) -> None:
        learnt: list[int] = []
        _, prompts = parts(learn=learnt.append)
        for ordered in (True, False):
            question = NodeQuestion("What is it?", ordered=ordered)
            prompts.preview(question, DOCUMENTS[:2])
            assert learnt == []
            request = prompts.commit(question, DOCUMENTS[:2]).request
            assert [learnt.pop()] == [request.prompt_tokens]

    def test_all_generations_share_the_system_prompt(self) -> None:
        _, prompts = parts()
        without, with_documents = (prompts.preview(NodeQuestion("Plan."), each) for each in ([], DOCUMENTS[:2]))
        assert without.messages is not None and with_documents.messages is not None
        assert without.messages[0] == with_documents.messages[0] == {"role": "system", "content": SYSTEM}
        assert without.messages[1] == {"role": "user", "content": "Plan."}

    def test_lengths_are_what_is_predicted_at_each_call(self) -> None:
        _, prompts = parts()
        lengths = prompts.lengths(NodeQuestion("What is it?"), DOCUMENTS[:2])
        assert lengths is not None
        before = lengths()
        prompts.commit(NodeQuestion("first"), DOCUMENTS[1::-1]).confirm(None)
        after = lengths()
        assert after.cached_tokens > before.cached_tokens and sum(after) == sum(before)
        assert prompts.lengths(NodeQuestion("What is it?", ordered=False), DOCUMENTS[:2]) is None
        assert prompts.lengths(NodeQuestion("Plan.", ordered=False), []) is not None


class PlainServer:
    """Runs workflows stage by stage."""

    def __init__(self, answer: str = "the answer") -> None:
        self.engine = ScriptedEngine(lambda asked: answer)
        self.scopes: list[Hashable] = []
        self.closed = False
        self.started = threading.Event()
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


VOCABULARY = "abcdef"


def embed(query: str) -> Any:
    return np.array(
        [query.split().count(name) + 0.06 - 0.01 * rank for rank, name in enumerate(VOCABULARY)], np.float32
    )


@pytest.fixture(scope="module")
def search() -> Iterator[ContinuousIVF]:
    """A real index, whose vectors are bags of the documents' names."""
    index = faiss.index_factory(len(VOCABULARY), "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.id) for document in DOCUMENTS])
    index.train(vectors)
    index.add(vectors)
    with ContinuousIVF(index, nprobe=2) as search:
        yield search


class Reader:
    """A fake engine whose answer names the documents of its prompt, whatever their order."""

    def __init__(self, *, reports: bool = True) -> None:
        self.usage = Usage(100, 40, 3, "stop") if reports else None
        self.requests: list[PromptRequest] = []
        self.asked = asyncio.Event()

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        self.requests.append(request)
        self.asked.set()
        for name in sorted(shown(request)) or ["none"]:
            yield AnswerChunk(f"{name} ")
        yield AnswerChunk("", self.usage)


def make_server(search: Any, engine: Any = None, **options: Any) -> OrderedWorkflows:
    orderer, builder = ordered()
    return ordered_workflows(
        engine or Reader(), search, embed, DOCUMENTS.__getitem__, orderer=orderer, builder=builder, **options
    )


@pytest.fixture
def workflows(search: ContinuousIVF) -> Iterator[SharedWorkflows]:
    with SharedWorkflows(lambda: make_server(search)) as shared:
        yield shared


class TestOrdered:
    @pytest.mark.parametrize("make", [one_shot, hyde, irg, multistep, recomp], ids=lambda make: make.__name__)
    async def test_answers_are_those_of_the_plain_interpreter(self, search: ContinuousIVF, make: Any) -> None:
        async def plainly(query: str, topk: int) -> Sequence[Document]:
            ids = search.submit(embed(query), topk).result().ids[0]
            return [DOCUMENTS[id] for id in ids if id >= 0]

        graph = make(topk=2).compile()
        questions = ["a b", "c", "f e d", "c b", "a"]
        _, prompts = parts()
        plain = [await interpret(graph, each, engine=Reader(), prompts=prompts, retrieve=plainly) for each in questions]
        async with make_server(search) as server:
            found = {number: result async for number, result in server.batch(graph, questions)}
        assert [found[number].text for number in range(5)] == [each.text for each in plain]  # type: ignore[union-attr]
        assert any(each.text != "none" for each in plain) or make is recomp

    async def test_documents_are_put_where_the_cache_has_them(self, search: ContinuousIVF) -> None:
        engine = Reader(reports=False)
        async with make_server(search, engine, transformations=[OrderDocuments()]) as server:
            graph = one_shot(topk=2).compile()
            first = await server.run(graph, "a b b")
            second = await server.run(graph, "a a b")
        assert [shown(request) for request in engine.requests] == ["ba", "ba"]
        assert [[each.id for each in result.state["docs"]] for result in (first, second)] == [["b", "a"], ["a", "b"]]

    async def test_the_waiting_request_with_most_cached_goes_next(self, search: ContinuousIVF) -> None:
        class Held(Reader):
            free = asyncio.Event()

            async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
                await self.free.wait()
                async for chunk in super().stream(request):
                    yield chunk

        engine, graph = Held(reports=False), one_shot(topk=2).compile()
        options: dict[str, Any] = {"transformations": [OrderDocuments()], "max_generations": 1}
        async with make_server(search, engine, **options) as server:
            runs = [asyncio.create_task(server.run(graph, each)) for each in ("a b b", "e f f", "b a a", "f e e") * 2]
            while len(server.wavefront.queue) < 7:
                await asyncio.sleep(0.001)
            engine.free.set()
            await asyncio.gather(*runs)
        found = ["".join(sorted(shown(request))) for request in engine.requests]
        assert len(found) == 8 and found[:4] == [found[0]] * 4 and found[4:] == [found[4]] * 4 != found[:4]

    async def test_a_cold_system_prompt_is_warmed_up_once(self) -> None:
        engine = Reader()

        async def until_warm(vector: Any, k: int) -> Sequence[int]:
            async with asyncio.timeout(60):
                await engine.asked.wait()
            return range(k)

        async with make_server(until_warm, engine) as server:
            for _ in range(2):
                await server.run(one_shot(topk=2).compile(), "a", scope="tenant")
        found = [(shown(each), each.options["max_tokens"], each.scope) for each in engine.requests]
        assert found == [("", 1, "tenant"), ("ab", 256, "tenant"), ("ab", 256, "tenant")]


class TestOpenAIServer:
    """A real server over HTTP: answers come token by token only where somebody reads the tokens."""

    @pytest.fixture
    def far_end(self) -> Iterator[ChatServer]:
        pytest.importorskip("openai")
        with chat_server() as server:
            yield server

    @asynccontextmanager
    async def serving(self, far_end: ChatServer, search: Any, **options: Any) -> AsyncIterator[OrderedWorkflows]:
        import openai

        from ragorder.adapters.openai.endpoint import OpenAIStreams

        async with (
            openai.AsyncOpenAI(base_url=f"{far_end.url}/v1", api_key="none") as client,
            make_server(search, OpenAIStreams(client, "served"), **options) as server,
        ):
            yield server

    async def bodies(
        self, far_end: ChatServer, search: Any, graph: RAGraph, requests: int, **options: Any
    ) -> list[bool]:
        """Which of the requests were streamed, by their order; the first one measures a prefill and is left out."""
        async with self.serving(far_end, search, warm_up=False, **options) as server:
            await server.run(one_shot().compile(), "the first")
            far_end.forget(lambda body: True)
            for number in range(requests):
                result = await server.run(graph.compile(), f"question {number}")
                assert result.text == far_end.answers[-1]["content"] and result.trace.outcome == "answered"
                *_, last = (piece for piece in result.trace.pieces if piece.worker == "engine")
                assert last.prompt_tokens == far_end.usages[-1]["prompt_tokens"]
                assert last.tokens == far_end.usages[-1]["completion_tokens"]
        return [bool(body.get("stream")) for body in far_end.bodies]

    async def test_answers_are_streamed_only_for_a_speculated_search_and_now_and_then_to_measure_the_prefill(
        self, far_end: ChatServer, search: ContinuousIVF
    ) -> None:
        assert await self.bodies(far_end, search, one_shot(), 3, transformations=()) == [False] * 3
        assert await self.bodies(far_end, search, hyde(), 2, transformations=()) == [False] * 4
        streamed = await self.bodies(far_end, search, hyde(), 2, transformations=[SpeculateRetrieval()])
        assert streamed == [True, False] * 2
        streamed = await self.bodies(far_end, search, one_shot(), 128, transformations=[OrderDocuments()])
        assert streamed.count(True) == 1

    async def test_an_option_unknown_to_the_client_is_named(self, far_end: ChatServer, search: ContinuousIVF) -> None:
        graph = RAGraph("odd").add_generation("answer", prompt="{query}", temprature=0.5)
        graph.add_edge(START, "answer").add_edge("answer", END)
        with pytest.raises(NodeError, match=r"node 'answer': TypeError: unexpected keyword argument 'temprature'$"):
            await self.bodies(far_end, search, graph, 1)

    async def test_a_stream_is_streamed(self, far_end: ChatServer, search: ContinuousIVF) -> None:
        async with (
            self.serving(far_end, search, transformations=()) as server,
            server.stream(hyde().compile(), "why?") as stream,
        ):
            pieces = [piece async for piece in stream]
        assert [bool(body.get("stream")) for body in far_end.bodies] == [False, True]
        assert len(pieces) > 3 and "".join(pieces) == stream.result.text == far_end.answers[-1]["content"]


class TestObservers:
    async def run(self, search: ContinuousIVF, *observers: Any) -> None:
        async with make_server(search, observers=observers) as server:
            await server.run(irg(rounds=2, topk=2).compile(), "secret a b")
            with pytest.raises(NodeError):
                await server.run(broken(), "secret")

    async def test_a_log_that_the_command_reads(self, search: ContinuousIVF, tmp_path: Path) -> None:
        from ragorder.eval.report.wavefront import figures_of, read_traces

        for _ in range(2):
            with TraceLog(tmp_path / "trace.jsonl") as log:
                await self.run(search, log)
        requests = read_traces(tmp_path / "trace.jsonl")
        figures = figures_of(requests)
        assert figures.outcomes == {"answered": 2, "failed": 2}
        assert figures.cached_share == pytest.approx(0.4)
        assert [piece.node for piece in requests[0].pieces if piece.kind == "due"].count("answer") == 2
        text = (tmp_path / "trace.jsonl").read_text("utf-8")
        assert "secret" not in text and "is a document" not in text

    async def test_metrics(self, search: ContinuousIVF) -> None:
        pytest.importorskip("prometheus_client")
        metrics = WorkflowMetrics()
        await self.run(search, metrics)

        def value(name: str, **labels: str) -> float | None:
            found: float | None = metrics.registry.get_sample_value(f"ragorder_workflow_{name}", labels)
            return found

        assert value("requests_total", graph="irg", outcome="answered") == 1
        assert value("requests_total", graph="broken", outcome="failed") == 1
        assert value("seconds_count", graph="irg") == 1
        assert (value("pieces_total", worker="engine", kind="due", outcome="used") or 0) >= 1
        assert value("pieces_from_memory_total", worker="engine") == 1
        prompt_tokens, cached_tokens = value("prompt_tokens_total"), value("cached_tokens_total")
        assert prompt_tokens and cached_tokens == pytest.approx(0.4 * prompt_tokens)
        assert (value("clusters_total") or 0) > 0
        with pytest.raises(ValueError):
            WorkflowMetrics(metrics.registry)

    async def test_spans(self, search: ContinuousIVF) -> None:
        sdk = pytest.importorskip("opentelemetry.sdk.trace")
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        await self.run(search, WorkflowTracing(provider.get_tracer("test")))
        spans = exporter.get_finished_spans()
        first, second = (span for span in spans if span.name == "ragorder.workflow")
        assert [dict(span.attributes or {})["ragorder.outcome"] for span in (first, second)] == ["answered", "failed"]
        inside = [span for span in spans if span.parent is not None and span.parent.span_id == first.context.span_id]
        assert {"ragorder.engine", "ragorder.search"} <= {span.name for span in inside}
        for span in inside:
            assert first.start_time <= span.start_time <= span.end_time <= first.end_time
        assert not any("secret" in str(span.attributes) for span in spans)
        provider.shutdown()

    async def test_one_that_fails_is_left_out(self, search: ContinuousIVF, caplog: pytest.LogCaptureFixture) -> None:
        calls: list[str] = []

        def failing(trace: WorkflowTrace) -> None:
            calls.append("failing")
            raise OSError("secret")

        await self.run(search, failing, lambda trace: calls.append(trace.graph))
        assert calls == ["failing", "irg", "broken"]
        assert "an observer of workflows failed with OSError and is left out" in caplog.text
        assert "secret" not in caplog.text


def broken() -> CompiledGraph:
    graph = RAGraph("broken").add_generation("a", prompt=lambda state: state["missing"])
    return graph.add_edge(START, "a").add_edge("a", END).compile()


class TestShared:
    def test_is_closed_with_its_server(self) -> None:
        server = PlainServer()
        with SharedWorkflows(lambda: server) as shared:
            assert shared.run(one_shot().compile(), "a").text == "the answer"
            assert not server.closed
        assert server.closed
        shared.close()
        with pytest.raises(RuntimeError, match="the shared workflow server is closed"):
            shared.run(one_shot().compile(), "a")

    async def test_serves_another_event_loop_and_is_cancelled_from_it(self) -> None:
        server = PlainServer()
        server.free.clear()
        shared = SharedWorkflows(lambda: server)
        try:
            running = asyncio.create_task(shared.arun(one_shot().compile(), "a"))
            assert await asyncio.to_thread(server.started.wait, 60)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert server.engine.sent == []
        finally:
            await asyncio.to_thread(shared.close)

    def test_an_error_comes_through(self, workflows: SharedWorkflows) -> None:
        with pytest.raises(NodeError, match="workflow 'broken', node 'a': the state has no 'missing'"):
            workflows.run(broken(), "question")

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


@pytest.fixture
def langchain() -> Any:
    pytest.importorskip("langchain_core")
    from ragorder.adapters.workflows import langchain

    return langchain


@pytest.fixture
def component() -> Any:
    pytest.importorskip("haystack")
    from ragorder.adapters.workflows.haystack import WorkflowComponent

    return WorkflowComponent


class Asked(TypedDict, total=False):
    question: str
    answer: str
    found: list[str]


class TestLangGraph:
    def test_a_node(self, workflows: SharedWorkflows, langchain: Any) -> None:
        graphs = pytest.importorskip("langgraph.graph")

        def update(result: WorkflowResult) -> dict[str, Any]:
            return {"found": [document.id for document in result.state["docs"]]}

        builder = graphs.StateGraph(Asked)
        builder.add_node("answer", langchain.workflow_node(workflows, hyde().compile()))
        again = langchain.workflow_node(
            workflows, one_shot(topk=2).compile(), question=lambda state: f"{state['answer']} d", answer=update
        )
        builder.add_node("again", again)
        builder.add_edge(graphs.START, "answer")
        builder.add_edge("answer", "again")
        builder.add_edge("again", graphs.END)
        app = builder.compile()
        expected = {"question": "b", "answer": "a b c d e", "found": ["d", "a"]}
        assert app.invoke({"question": "b"}) == expected
        assert asyncio.run(app.ainvoke({"question": "b"})) == expected

    async def test_the_answer_is_streamed_as_messages(self, workflows: SharedWorkflows, langchain: Any) -> None:
        graphs = pytest.importorskip("langgraph.graph")
        builder = graphs.StateGraph(Asked)
        builder.add_node("research", langchain.workflow_node(workflows, hyde(topk=3).compile()))
        builder.add_edge(graphs.START, "research")
        app = builder.add_edge("research", graphs.END).compile()
        modes = ["messages", "values"]
        events = list(app.stream({"question": "b"}, stream_mode=modes))
        later = [event async for event in app.astream({"question": "b"}, stream_mode=modes)]
        for streamed in (events, later):
            texts = [part.content for mode, value in streamed if mode == "messages" for part in value[:1]]
            whole = streamed[-1][1]["answer"]
            assert len([text for text in texts if text]) == 3 and "".join(texts) == whole == "a b c"
            nodes = {value[1]["langgraph_node"] for mode, value in streamed if mode == "messages"}
            assert nodes == {"research"}

    def test_inputs_and_scope_come_from_the_state(self, langchain: Any) -> None:
        graph = RAGraph("styled", inputs=["style"]).add_generation("a", prompt="{query} in {style}")
        server = PlainServer()
        with SharedWorkflows(lambda: server) as workflows:
            node = langchain.workflow_node(
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
    def test_a_retriever_also_of_converted_documents(self, workflows: SharedWorkflows, langchain: Any) -> None:
        retriever = langchain.WorkflowRetriever(workflows=workflows, graph=one_shot(topk=2).compile())
        for found in (retriever.invoke("c"), asyncio.run(retriever.ainvoke("c"))):
            assert [(each.id, each.page_content, each.metadata) for each in found] == [
                (document.id, document.text, document.metadata) for document in (DOCUMENTS[2], DOCUMENTS[0])
            ]
        convert = {"convert": lambda document: langchain.Document(f"<{document.id}>")}
        retriever = langchain.WorkflowRetriever(workflows=workflows, graph=retriever.graph, **convert)
        assert [each.page_content for each in retriever.invoke("e")] == ["<e>", "<a>"]

    def test_generates_no_answer_for_nobody(self, search: ContinuousIVF, langchain: Any) -> None:
        engine = Reader()
        with SharedWorkflows(lambda: make_server(search, engine, warm_up=False)) as workflows:
            retriever = langchain.WorkflowRetriever(workflows=workflows, graph=hyde(topk=2).compile())
            found = [[each.id for each in retriever.invoke(f"{name} {number}")] for number, name in enumerate("abcde")]
        assert all(len(each) == 2 for each in found) and [shown(request) for request in engine.requests] == [""] * 5


class TestHaystack:
    def test_a_component(self, workflows: SharedWorkflows, component: Any) -> None:
        made = component(workflows, irg(topk=2, rounds=2).compile(), scope="tenant")
        pipeline = pytest.importorskip("haystack").Pipeline()
        pipeline.add_component("research", made)
        outputs = (pipeline.run({"research": {"query": "f"}})["research"], asyncio.run(made.run_async("f")))
        for output in outputs:
            assert output["replies"] == ["a f"]
            assert [(each.id, each.content, each.meta) for each in output["documents"]] == [
                (document.id, document.text, document.metadata) for document in (DOCUMENTS[5], DOCUMENTS[0])
            ]

    def test_a_scope_of_its_own_replaces_the_components(self, component: Any) -> None:
        server = PlainServer()
        with SharedWorkflows(lambda: server) as workflows:
            made = component(workflows, one_shot().compile(), scope="tenant")
            made.run("a")
            made.run("a", scope="")
            asyncio.run(made.run_async("a", scope=""))
        assert server.scopes == ["tenant", "", ""]

    def test_is_not_serialised(self, workflows: SharedWorkflows, component: Any) -> None:
        errors = pytest.importorskip("haystack.core.errors")
        with pytest.raises(errors.SerializationError, match="a server in this process"):
            component(workflows, one_shot().compile()).to_dict()


@pytest.mark.slow
class TestEmbeddedEngine:
    @pytest.fixture(scope="class")
    def engine(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
        """An engine, and its tokenizer."""
        pytest.importorskip("torch")
        tokenizers = pytest.importorskip("transformers").AutoTokenizer
        from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
        from ragorder.kernels.engine import EngineSettings, TieredEngine
        from ragorder.kernels.random_model import make_model

        texts = [SYSTEM, *(document.text for document in DOCUMENTS)]
        folder = tmp_path_factory.mktemp("models") / "workflows"
        make_model(folder, texts=texts, layers=1, hidden_size=64, vocab_size=400, max_position_embeddings=2048)
        settings = EngineSettings(device_tokens=4096, dtype="float32", device="cpu")
        worker = EngineWorker(TieredEngine.load(folder, settings))
        yield EmbeddedStreams(worker), tokenizers.from_pretrained(folder)
        worker.close()

    async def test_closing_a_stream_aborts_its_request(self, engine: tuple[Any, Any]) -> None:
        streams, tokenizer = engine
        _, prompts = parts(tokenizer=tokenizer, prompts="token_ids")
        request = prompts.preview(NodeQuestion("Go on.", max_tokens=1000), DOCUMENTS)
        async with aclosing(streams.stream(request)) as chunks:
            await anext(chunks)
            assert streams.requests() == 1
        assert streams.requests() == 0

    async def test_refuses_what_it_cannot_take(self, engine: tuple[Any, Any]) -> None:
        streams, tokenizer = engine
        _, prompts = parts()
        with pytest.raises(ValueError, match="takes token ids"):
            await anext(streams.stream(prompts.preview(NodeQuestion("Go on."), [])))
        _, prompts = parts(tokenizer=tokenizer, prompts="token_ids")
        with pytest.raises(TypeError, match="presence_penalty"):
            request = prompts.preview(NodeQuestion("Go on.", options={"presence_penalty": 1}), [])
            await anext(streams.stream(request))


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_vllm_server(vllm_server: Any, vllm_model: Path, search: ContinuousIVF) -> None:
    """The second round finds the documents of the first, which its query ranks in another order."""
    openai = pytest.importorskip("openai")
    from ragorder.adapters.openai.endpoint import OpenAIStreams
    from ragorder.eval.engines.models import load_tokenizer

    vllm_server.reset()
    block_size = vllm_server.block_size
    builder = PromptBuilder(SYSTEM, question_template="{query}", tokenizer=load_tokenizer(vllm_model))
    orderer = Orderer(
        tokens=builder.document_tokens,
        block_size=block_size,
        capacity_tokens=vllm_server.capacity_tokens,
        prefix_tokens=builder.prefix_tokens,
        strict=True,
    )
    graph = RAGraph("again")
    graph.add_retrieval("search", query="query", topk=3).add_generation("guess", prompt="{query} {docs}", max_tokens=4)
    graph.add_retrieval("more", query=lambda state: f"{state['query']} c c b", topk=3, output="others")
    graph.add_generation("answer", prompt="{query} {others}", max_tokens=4)
    for source, target in itertools.pairwise((START, "search", "guess", "more", "answer", END)):
        graph.add_edge(source, target)
    async with (
        openai.AsyncOpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none", max_retries=0) as client,
        ordered_workflows(
            OpenAIStreams(client, "served"),
            search,
            embed,
            DOCUMENTS.__getitem__,
            orderer=orderer,
            builder=builder,
            warm_up=False,
        ) as server,
    ):
        result = await server.run(graph.compile(), "a", scope="tenant")
    assert ["".join(each.id for each in result.state[name]) for name in ("docs", "others")] == ["abc", "cab"]
    _, second = (each for each in result.trace.pieces if each.worker == "engine" and each.kind == "due")
    documents_end = builder.prefix_tokens + sum(map(builder.document_tokens, DOCUMENTS[:3]))
    assert second.cached_tokens >= documents_end // block_size * block_size
