"""Messages with documents as content parts and cache breakpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.documents import Document

__all__ = ["content_parts"]


def _text(document: Document) -> str:
    return f"{document.page_content}\n\n"


def content_parts(
    documents: Sequence[Document],
    question: str,
    *,
    mark_key: str | None = None,
    show: Callable[[Document], str] = _text,
) -> list[dict[str, Any]]:
    """Return the content of a HumanMessage: a text part for each document, by `show`, then the question. With the
    `mark_key` of `CacheOrderRetriever`, its breakpoints become cache_control (Anthropic, Bedrock).

        documents = CacheOrderRetriever(retriever=retriever, orderer=orderer, mark_key="mark").invoke(question)
        model.invoke([HumanMessage(content_parts(documents, question, mark_key="mark"))])
    """
    parts = [_part(show(each), mark_key is not None and mark_key in (each.metadata or {})) for each in documents]
    return [*parts, _part(question, marked=False)]


def _part(text: str, marked: bool) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "text", "text": text}
    return part | {"cache_control": {"type": "ephemeral"}} if marked else part
