"""The same requests through every integration, on a real server: each finds in its cache what plain Python finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.rings import length
from support.serve_process import SERVE, ServeProcess, launching

from ragorder import Document, Orderer, PromptBuilder

pytestmark = pytest.mark.vllm

SYSTEM = "Answer the question from the documents below."
REQUESTS = length(60, 40)
# One token of answer: after the documents stand the question and what the chat template puts after it.
SUFFIX_TOKENS = 24

Request = tuple[str, list[Document]]
Served = list[tuple[int, int]]


@pytest.fixture(scope="module")
def builder(vllm_model: Path) -> PromptBuilder:
    from transformers import AutoTokenizer

    return PromptBuilder(SYSTEM, tokenizer=AutoTokenizer.from_pretrained(vllm_model))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """A trace whose documents come back in ever different order; its working set is larger than the cache."""
    from ragorder.eval.data.workloads import make_workload

    workload = make_workload("paper-shuf", 0, requests=REQUESTS)
    return [
        (f"What do they say about number {number}?", [workload.documents[d] for d in ranking])
        for number, ranking in enumerate(workload.rankings[:REQUESTS])
    ]


@pytest.fixture
def orderer(vllm_server: Any, builder: PromptBuilder) -> Orderer:
    """A fresh one, for an empty cache."""
    vllm_server.reset()
    return make_orderer(vllm_server, builder)


def make_orderer(server: Any, builder: PromptBuilder, **options: Any) -> Orderer:
    return Orderer(
        tokens=builder.document_tokens,
        block_size=server.block_size,
        capacity_tokens=server.capacity_tokens,
        prefix_tokens=builder.prefix_tokens,
        suffix_tokens=SUFFIX_TOKENS,
        strict=True,
        **options,
    )


@pytest.fixture(scope="module")
def plain(vllm_server: Any, builder: PromptBuilder, requests: list[Request]) -> Served:
    """(prompt tokens, cached tokens) of each request, as the lines of docs/python.md serve them."""
    vllm_server.reset()
    orderer = make_orderer(vllm_server, builder)
    served = []
    with asking(vllm_server) as ask:
        for question, documents in requests:
            ordering = orderer.order(documents)
            used = ask(builder.build(question, ordering).messages)
            ordering.confirm(used[1], prompt_tokens=used[0])
            served.append(used)
    return served


@contextmanager
def asking(server: Any, url: str | None = None) -> Iterator[Callable[..., tuple[int, int]]]:
    """A function that sends messages to the server, or to a proxy at `url`, for an answer of one token."""
    import openai

    with openai.OpenAI(base_url=f"{url or server.base_url}/v1", api_key="none") as client:

        def ask(messages: Any, **extra_body: Any) -> tuple[int, int]:
            fixed: Any = {"model": server.model_name, "max_tokens": 1, "temperature": 0, "extra_body": extra_body}
            return usage(client.chat.completions.create(messages=messages, **fixed).usage)

        yield ask


def ask_tagged(ask: Callable[..., tuple[int, int]], requests: list[Request]) -> Served:
    """The requests with tagged documents, as the proxy orders them."""
    system = [{"role": "system", "content": SYSTEM}]
    return [
        ask(system, ragorder={"documents": [{"id": d.id, "text": d.text} for d in documents], "query": question})
        for question, documents in requests
    ]


def usage(reported: Any) -> tuple[int, int]:
    return reported.prompt_tokens, reported.prompt_tokens_details.cached_tokens or 0


def documents_text(documents: list[Document]) -> str:
    return "".join(f"[{document.id}]\n{document.text}\n\n" for document in documents)


def check(served: Served, plain: Served) -> None:
    assert len(served) == REQUESTS
    assert served == plain


def test_plain_python_finds_more_than_retrieval_order_does(
    vllm_server: Any, builder: PromptBuilder, requests: list[Request], plain: Served
) -> None:
    """There is something to be equal to: prompts differ, documents are evicted, and ordering helps."""
    vllm_server.reset()
    with asking(vllm_server) as ask:
        retrieval = sum(ask(builder.build(question, documents).messages)[1] for question, documents in requests)
    assert sum(cached for _, cached in plain) > 1.5 * retrieval > 0
    assert sum(tokens for tokens, _ in plain) > 5 * vllm_server.capacity_tokens


def test_langchain(vllm_server: Any, orderer: Orderer, requests: list[Request], plain: Served) -> None:
    from langchain_core.documents import Document as LangChainDocument
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnablePassthrough
    from langchain_openai import ChatOpenAI

    from ragorder.adapters.langchain import CacheOrderRetriever, FeedbackHandler

    found = {
        question: [LangChainDocument(id=document.id, page_content=document.text) for document in documents]
        for question, documents in requests
    }

    class Retriever(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[LangChainDocument]:
            return found[query]

    def show(documents: list[LangChainDocument]) -> str:
        return "".join(f"[{document.id}]\n{document.page_content}\n\n" for document in documents)

    prompt = ChatPromptTemplate([("system", SYSTEM), ("user", "{documents}Question: {question}")])
    model = ChatOpenAI(
        base_url=f"{vllm_server.base_url}/v1", api_key="none", model=vllm_server.model_name, max_tokens=1, temperature=0
    )
    retriever = CacheOrderRetriever(retriever=Retriever(), orderer=orderer)
    chain = {"documents": retriever | show, "question": RunnablePassthrough()} | prompt | model
    served = []
    for question, _ in requests:
        reported = chain.invoke(question, config={"callbacks": [FeedbackHandler()]}).usage_metadata
        served.append((reported["input_tokens"], reported["input_token_details"].get("cache_read", 0)))
    check(served, plain)


def test_llama_index(
    vllm_server: Any, builder: PromptBuilder, orderer: Orderer, requests: list[Request], plain: Served
) -> None:
    from llama_index.core import PromptTemplate
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.prompts import ChatPromptTemplate
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.llms.openai_like import OpenAILike

    from ragorder.adapters.llama_index import CacheOrderPostprocessor

    found = {
        question: [
            NodeWithScore(node=TextNode(id_=document.id, text=f"[{document.id}]\n{document.text}"), score=1.0)
            for document in documents
        ]
        for question, documents in requests
    }
    lengths = {document.id: builder.document_tokens(document) for _, documents in requests for document in documents}
    served: Served = []

    class Retriever(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return found[query_bundle.query_str]

    class Model(OpenAILike):
        def chat(self, messages: Any, **options: Any) -> Any:
            response = super().chat(messages, **options)
            served.append(usage(response.raw.usage))
            return response

    model = Model(
        api_base=f"{vllm_server.base_url}/v1",
        api_key="none",
        model=vllm_server.model_name,
        is_chat_model=True,
        context_window=2048,
        max_tokens=1,
        temperature=0,
    )
    template = ChatPromptTemplate(
        [
            ChatMessage(role="system", content=SYSTEM),
            ChatMessage(role="user", content="{context_str}\n\nQuestion: {query_str}"),
        ]
    )
    postprocessor = CacheOrderPostprocessor(
        # The node's text has the heading already: its length is not the builder's to tell.
        Orderer(orderer.settings),
        tokens=lambda node: lengths[node.node_id],
    )
    engine = RetrieverQueryEngine(
        Retriever(),
        get_response_synthesizer(llm=model, text_qa_template=template, refine_template=PromptTemplate("{query_str}")),
        node_postprocessors=[postprocessor],
    )
    for question, _ in requests:
        engine.query(question)
    check(served, plain)


def test_haystack(
    vllm_server: Any, orderer: Orderer, requests: list[Request], plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document as HaystackDocument
    from haystack import Pipeline
    from haystack.components.builders import ChatPromptBuilder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    from ragorder.adapters.haystack import CacheOrderRanker

    template = [
        ChatMessage.from_system(SYSTEM),
        ChatMessage.from_user(
            "{% for document in documents %}[{{ document.id }}]\n{{ document.content }}\n\n{% endfor %}"
            "Question: {{ question }}"
        ),
    ]
    pipeline = Pipeline()
    pipeline.add_component("ranker", CacheOrderRanker(orderer))
    pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
    pipeline.add_component(
        "model",
        OpenAIChatGenerator(
            api_key=Secret.from_token("none"),
            model=vllm_server.model_name,
            api_base_url=f"{vllm_server.base_url}/v1",
            generation_kwargs={"max_tokens": 1, "temperature": 0},
        ),
    )
    pipeline.connect("ranker.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "model.messages")
    served = []
    for question, documents in requests:
        given = [HaystackDocument(id=document.id, content=document.text) for document in documents]
        done = pipeline.run({"ranker": {"documents": given}, "prompt": {"question": question}})
        reported = done["model"]["replies"][0].meta["usage"]
        details = reported["prompt_tokens_details"] or {}
        served.append((reported["prompt_tokens"], details.get("cached_tokens") or 0))
    check(served, plain)


def test_dspy(
    vllm_server: Any, builder: PromptBuilder, orderer: Orderer, requests: list[Request], plain: Served
) -> None:
    """Passages have no ids in DSPy: each carries its heading, so that its text is what stands in the prompt."""
    import dspy

    from ragorder.adapters.dspy import CacheOrderRetriever

    found = {question: [documents_text([document]) for document in documents] for question, documents in requests}
    every = [document for _, documents in requests for document in documents]
    lengths = {documents_text([document]): builder.document_tokens(document) for document in every}

    class Answer(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.retrieve = CacheOrderRetriever(
                lambda question: dspy.Prediction(passages=found[question]),
                Orderer(orderer.settings),
                tokens=lambda passage: lengths[passage],
            )
            self.model = dspy.LM(
                f"openai/{vllm_server.model_name}",
                api_base=f"{vllm_server.base_url}/v1",
                api_key="none",
                cache=False,
                max_tokens=1,
                temperature=0,
            )

        def forward(self, question: str) -> tuple[int, int]:
            documents = "".join(self.retrieve(question).passages)
            content = f"{documents}Question: {question}"
            self.model(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}])
            reported = self.model.history[-1]["usage"]
            return reported["prompt_tokens"], cached(reported["prompt_tokens_details"])

    def cached(details: Any) -> int:
        return (details.get("cached_tokens") if isinstance(details, dict) else details.cached_tokens) or 0

    answer = Answer()
    check([answer(question) for question, _ in requests], plain)


@pytest.mark.slow
def test_proxy(vllm_server: Any, vllm_model: Path, requests: list[Request], plain: Served) -> None:
    """`ragorder serve` itself, which reads the size of the cache from the server. What it says was saved is what the
    server reported."""
    from ragorder.adapters.observing.stats import fetch_stats

    vllm_server.reset()
    with launching(ServeProcess, *SERVE, *proxy_options(vllm_server, vllm_model)) as serve:
        url = serve().url
        with asking(vllm_server, url) as ask:
            served = ask_tagged(ask, requests)
        stats = fetch_stats(url)
    check(served, plain)
    assert (stats.served, stats.reports) == (REQUESTS, REQUESTS)
    assert stats.prompt_tokens == sum(tokens for tokens, _ in served)
    assert stats.cached_tokens == sum(cached for _, cached in served)
    assert stats.cached_tokens > 1.5 * (stats.other_cached_tokens or 0)


@pytest.mark.slow
def test_the_proxy_in_shadow_mode(
    vllm_server: Any, vllm_model: Path, builder: PromptBuilder, requests: list[Request], plain: Served
) -> None:
    """Prompts are those of retrieval order; what would have been saved is what plain Python does save, to within a
    block a request."""
    from ragorder.adapters.observing.stats import fetch_stats

    vllm_server.reset()
    with launching(ServeProcess, *SERVE, *proxy_options(vllm_server, vllm_model), "--shadow") as serve:
        url = serve().url
        with asking(vllm_server, url) as ask:
            ask_tagged(ask, requests)
        stats = fetch_stats(url)
    assert stats.shadow
    assert stats.reports == REQUESTS
    would_be = stats.other_cached_tokens or 0
    assert would_be > 1.5 * stats.cached_tokens
    assert abs(would_be - sum(cached for _, cached in plain)) <= REQUESTS * vllm_server.block_size


def proxy_options(server: Any, model: Path) -> tuple[str, ...]:
    return "--port", "0", "--upstream", server.base_url, "--tokenizer", str(model)
