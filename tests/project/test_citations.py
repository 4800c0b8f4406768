"""The page on citations: what it shows runs, and says the truth of a prompt that was put in order."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragorder import Document, Orderer, PromptBuilder
from ragorder.citations import number_label

PAGE = Path(__file__).resolve().parents[2] / "docs" / "citations.md"
# Best first, as retrieval gave them: the cache has them as c, a, b.
RANKED = ["a", "b", "c"]
IN_THE_PROMPT = ["c", "a", "b"]


def text(name: str) -> str:
    return f"What there is to know of {name}."


def name(passage: str) -> str:
    return passage[-2]


def run(section: str, **given: Any) -> dict[str, Any]:
    """Run what the page shows in a section, with these names given."""
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, section
    (code,) = re.findall(r"```python\n(.*?)```", found[1], re.DOTALL)
    names = {"re": re, "question": "Which of them?", **given}
    exec(compile(code, f"{PAGE.name}: {section}", "exec"), names)  # noqa: S102
    return names


def llama_nodes(names: list[str]) -> list[Any]:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [TextNode(id_=each, text=text(each), metadata={"label": number_label(text(each))}) for each in names]
    return [NodeWithScore(node=node, score=1 / rank) for rank, node in enumerate(nodes, 1)]


def llama_retriever() -> Any:
    from llama_index.core.retrievers import BaseRetriever

    class Finder(BaseRetriever):
        def _retrieve(self, query_bundle: Any) -> list[Any]:
            return llama_nodes(RANKED)

    return Finder()


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=1)


def test_every_section_with_code_is_run_here() -> None:
    page, tests = PAGE.read_text("utf-8"), Path(__file__).read_text("utf-8")
    sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(sections) == page.count("```python") == 7
    assert [section for section in sections if f'run(\n        "{section}"' not in tests] == []


def test_labels_that_do_not_move(orderer: Orderer) -> None:
    documents = {each: Document(each, text(each)) for each in RANKED}
    orderer.order([documents[each] for each in IN_THE_PROMPT])
    names = run(
        "Labels that do not move",
        PromptBuilder=PromptBuilder,
        orderer=orderer,
        documents=[documents[each] for each in RANKED],
        ask=lambda prompt: f"It is [{number_label(text('b'))}], see [{number_label(text('c'))}].",
    )
    assert [document.id for document in names["ordering"].documents] == IN_THE_PROMPT
    assert [document.id for document in names["sources"]] == ["b", "c"]


def test_in_plain_python(orderer: Orderer) -> None:
    documents = {each: Document(each, text(each)) for each in RANKED}
    orderer.order([documents[each] for each in IN_THE_PROMPT])
    names = run(
        "Plain Python",
        orderer=orderer,
        documents=[documents[each] for each in RANKED],
        ask=lambda prompt, question: f"It is [2], see {prompt[:3]}",
    )
    assert [name(passage) for passage in names["prompt"].split("\n\n")] == IN_THE_PROMPT
    assert [document.id for document in names["cited"]] == ["a", "c"]
    assert [document.id for document in names["best_first"]] == RANKED


def test_in_langchain(orderer: Orderer) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer

    documents = {each: Document(text(each), id=each) for each in RANKED}
    CacheOrderTransformer(orderer).invoke([documents[each] for each in IN_THE_PROMPT])
    names = run(
        "LangChain",
        CacheOrderRetriever=CacheOrderRetriever,
        orderer=orderer,
        retriever=RunnableLambda(lambda question: [documents[each] for each in RANKED]),
        chain=RunnableLambda(lambda inputs: f"It is [2], see {inputs['context'][:3]}"),
    )
    assert [name(passage) for passage in names["context"].split("\n\n")] == IN_THE_PROMPT
    assert [document.id for document in names["cited"]] == ["a", "c"]
    assert [document.id for document in names["best_first"]] == RANKED


def test_in_llama_index(orderer: Orderer) -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine

    from ragorder.adapters.llama_index import CacheOrderPostprocessor

    CacheOrderPostprocessor(orderer).postprocess_nodes(llama_nodes(IN_THE_PROMPT))
    names = run(
        "LlamaIndex",
        RetrieverQueryEngine=RetrieverQueryEngine,
        CacheOrderPostprocessor=CacheOrderPostprocessor,
        retriever=llama_retriever(),
        llm=MockLLM(),
        orderer=orderer,
    )
    assert [found.node_id for found in names["in_the_prompt"]] == IN_THE_PROMPT
    assert re.findall(r"know of (\w)\.", str(names["response"])) == IN_THE_PROMPT
    assert [found.node_id for found in names["best_first"]] == RANKED


def test_in_haystack(orderer: Orderer) -> None:
    pytest.importorskip("haystack")
    from haystack import Document
    from haystack.components.builders import PromptBuilder

    from ragorder.adapters.haystack import CacheOrderRanker

    documents = [Document(id=each, content=text(each), score=1 / rank) for rank, each in enumerate(RANKED, 1)]
    CacheOrderRanker(orderer).run([documents[RANKED.index(each)] for each in IN_THE_PROMPT])
    names = run(
        "Haystack",
        CacheOrderRanker=CacheOrderRanker,
        PromptBuilder=PromptBuilder,
        orderer=orderer,
        documents=documents,
    )
    shown = re.findall(r"\[(\d)\] .* (\w)\.", names["prompt"])
    assert shown == [("1", "c"), ("2", "a"), ("3", "b")]
    assert [document.id for document in names["best_first"]] == RANKED


def test_in_dspy(orderer: Orderer) -> None:
    dspy = pytest.importorskip("dspy")
    from ragorder.adapters.dspy import CacheOrderRetriever

    CacheOrderRetriever(lambda question: [text(each) for each in IN_THE_PROMPT], orderer)("?")
    names = run(
        "DSPy",
        dspy=dspy,
        CacheOrderRetriever=CacheOrderRetriever,
        orderer=orderer,
        retrieve=lambda question: [text(each) for each in RANKED],
    )
    assert list(map(name, names["found"].passages)) == IN_THE_PROMPT
    assert list(map(name, names["best_first"])) == RANKED


@pytest.mark.parametrize(("headers", "expected"), [({"x-ragorder-permutation": "2,0,1"}, IN_THE_PROMPT), ({}, RANKED)])
def test_at_the_proxy(headers: dict[str, str], expected: list[str]) -> None:
    create = SimpleNamespace(create=lambda **request: SimpleNamespace(headers=headers))
    completions = SimpleNamespace(with_raw_response=create)
    names = run(
        "The proxy",
        client=SimpleNamespace(chat=SimpleNamespace(completions=completions)),
        request={},
        documents=RANKED,
    )
    assert names["in_the_prompt"] == expected
