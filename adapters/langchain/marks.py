"""Cache breakpoints of clouds in LangChain's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, SystemMessage

from ragorder.adapters.turns import NextTurn

Marks = bool | Literal["anthropic", "bedrock", "openai"]


def checked_marks(marks: Marks) -> str:
    """Return the breakpoints' form, "" for none. Raises ValueError."""
    if marks is True or marks is False:
        return "anthropic" if marks else ""
    if marks not in ("anthropic", "bedrock", "openai"):
        raise ValueError(f"marks is {marks!r}: give True, False, 'anthropic', 'bedrock' or 'openai'")
    return marks


def marked(messages: Sequence[BaseMessage], turn: NextTurn[Any], form: str) -> tuple[list[BaseMessage], dict[str, Any]]:
    cloud = turn.ordering.cloud
    if not form or cloud is None or cloud.model.rules.resume != "marks":
        return list(messages), {}
    from ragorder.clouds import TurnParts
    from ragorder.clouds.parts import cache_control, cache_options, cache_point, prompt_cache_breakpoint

    ttl = cloud.model.rules.ttl
    others = (place for place, message in enumerate(messages) if not isinstance(message, SystemMessage))
    plain = [{"role": message.type, "content": message.content} for message in messages]
    parts = TurnParts(plain, next(others, 0), cloud.turn_marks)
    arguments = cache_options(ttl) if form == "openai" else {}
    try:
        if form == "bedrock":
            contents = parts.contents(cache_point(ttl), apart=True)
        else:
            contents = parts.contents(prompt_cache_breakpoint() if form == "openai" else cache_control(ttl))
    except Exception:
        # Content of an unknown form is sent unchanged.
        return list(messages), arguments
    return [_with(message, content) for message, content in zip(messages, contents, strict=True)], arguments


def _with(message: BaseMessage, content: Any) -> BaseMessage:
    # A call without text has no part for a breakpoint.
    if content is message.content or not message.content:
        return message
    return message.model_copy(update={"content": content})


def _text(document: Document) -> str:
    return f"{document.page_content}\n\n"


def content_parts(
    documents: Sequence[Document],
    question: str,
    *,
    mark_key: str | None = None,
    show: Callable[[Document], str] = _text,
) -> list[dict[str, Any]]:
    """Return a HumanMessage's content: a part for each document, by `show`, then the question. A
    `CacheOrderRetriever`'s breakpoints under `mark_key` become cache_control (Anthropic, Bedrock).

        documents = CacheOrderRetriever(retriever=retriever, orderer=orderer, mark_key="mark").invoke(question)
        model.invoke([HumanMessage(content_parts(documents, question, mark_key="mark"))])
    """
    parts = [_part(show(each), mark_key is not None and mark_key in (each.metadata or {})) for each in documents]
    return [*parts, _part(question, marked=False)]


def _part(text: str, marked: bool) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "text", "text": text}
    return part | {"cache_control": {"type": "ephemeral"}} if marked else part
