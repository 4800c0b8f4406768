"""LangChain's messages with a content part for each document, and marks behind those that a cache should keep."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from ragorder import Orderer
from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, content_parts
from ragorder.adapters.langchain import retriever as module

MARK = {"type": "ephemeral"}


def found(names: str) -> list[Document]:
    return [Document(f"{name} is a document. " * 40, id=name, metadata={"source": name}) for name in names]


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=16, strict=True, feedback=False)


def names_of(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"][0] for part in parts)


def marked(parts: list[dict[str, Any]]) -> list[int]:
    return [place for place, part in enumerate(parts) if part.get("cache_control") == MARK]


def test_a_part_for_each_document_and_the_question() -> None:
    parts = content_parts(found("ab"), "Which?")
    assert [part["text"] for part in parts] == [*(f"{each.page_content}\n\n" for each in found("ab")), "Which?"]
    assert {part["type"] for part in parts} == {"text"}
    assert marked(parts) == []
    assert HumanMessage(parts).content == parts


def test_marks_stand_behind_what_earlier_requests_began_with(orderer: Orderer) -> None:
    asked = {"one": found("abc"), "two": found("dba")}
    retriever = CacheOrderRetriever(retriever=RunnableLambda(asked.__getitem__), orderer=orderer, mark_key="mark")
    first, second = (content_parts(retriever.invoke(name), "Which?", mark_key="mark") for name in asked)
    assert (names_of(first), names_of(second)) == ("abcW", "abdW")
    assert marked(first) == []
    assert marked(second) == [1]


def test_documents_themselves_stay_as_they_are(orderer: Orderer) -> None:
    documents = found("abc")
    reorder = CacheOrderTransformer(orderer, mark_key="mark", rank_key="rank")
    for _ in range(2):
        ordered = reorder.invoke(documents)
    assert [each.metadata for each in documents] == [{"source": name} for name in "abc"]
    assert [each.metadata["rank"] for each in ordered] == [{"rank": rank} for rank in range(3)]
    assert any(each.metadata.get("mark") for each in ordered)


def test_marks_of_an_earlier_request_are_gone(orderer: Orderer) -> None:
    marked = [Document(each.page_content, id=each.id, metadata={"mark": True}) for each in found("abcdef")]
    ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(marked)
    assert [each.metadata for each in ordered] == [{}] * 6
    assert all(each.metadata == {"mark": True} for each in marked)


def test_a_choice_that_fails_sets_none_and_says_so(orderer: Orderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "marked_documents", lambda ordering: 1 / 0)
    ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(found("ab"))
    assert [each.id for each in ordered] == ["a", "b"]
    assert "ZeroDivisionError" in orderer.degraded[0]


def test_the_form_of_a_document_can_be_given() -> None:
    parts = content_parts(found("a"), "Which?", show=lambda document: f"<{document.id}>")
    assert [part["text"] for part in parts] == ["<a>", "Which?"]
