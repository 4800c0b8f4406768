"""Middleware for LangChain agents with documents from tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage, convert_to_messages
from langchain_core.runnables import Runnable

from ragorder.common.extras import install_hint

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, types
    from langgraph.types import Command
except ImportError as error:
    raise ImportError(
        f"ragorder.adapters.langchain.middleware needs langchain 1.x: {install_hint('langchain')} 'langchain>=1,<2'"
    ) from error

from ragorder.adapters.langchain.conversation import LangChainTurns, Prepared, artifact_documents
from ragorder.adapters.langchain.marks import Marks, checked_marks, marked
from ragorder.adapters.langchain.payloads import text_of
from ragorder.adapters.reorder import ScopeOf
from ragorder.adapters.turns import Label
from ragorder.conversation import REFERENCE, Repeat
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike

__all__ = ["CacheOrderMiddleware"]


class CacheOrderMiddleware(AgentMiddleware):  # type: ignore[misc]
    """Last middleware of an agent. It never changes messages of an earlier model call. Thread-safe.

        agent = create_agent(model, [search], middleware=[CacheOrderMiddleware(orderer, repeat="name")])

    - `retriever`: documents for each user question, between history and question.
    - `repeat="name"`: a tool's documents that earlier messages have are only named: a message with all of its documents
      whole is rewritten before its first use and in the agent's state. By default results stay as the tools wrote them.
    - `documents`: those of a tool's message (default: its artifact, as `create_retriever_tool(…,
      response_format="content_and_artifact")` makes it).
    - `builder`: give it the agent's system prompt, whose length counts.
    - `scope`: the tenant, or a function of the ModelRequest.
    - `reference`, `label`, `marks`: as for `CacheOrderTurn`; breakpoints are not in the agent's state.

    Errors in these functions, except the retriever's, are counted and leave messages unchanged, or documents in
    retrieval order. Raises TypeError, ValueError.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        *,
        builder: PromptBuilder | None = None,
        retriever: Runnable[str, list[Document]] | None = None,
        repeat: Repeat = "send",
        reference: str = REFERENCE,
        documents: Callable[[ToolMessage], Sequence[Document]] = artifact_documents,
        label: Label | None = None,
        scope: ScopeOf = None,
        marks: Marks = False,
    ) -> None:
        super().__init__()
        if retriever is not None and not isinstance(retriever, Runnable):
            raise TypeError(f"retriever is a {type(retriever).__name__}: give a Runnable, such as store.as_retriever()")
        self._retriever = retriever
        self._marks = checked_marks(marks)
        self._turns = LangChainTurns(
            orderer,
            builder,
            found=documents,
            parts=bool(marks),
            label=label,
            scope=scope,
            repeat=repeat,
            reference=reference,
        )

    def label(self, document: Document) -> str:
        """Return a document's label, as `cited(answer, documents, middleware.label)` calls it."""
        return self._turns.label(document)

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> Any:
        documents, messages = None, _messages_of(request)
        if (question := self._question(messages)) is not None and self._retriever is not None:
            documents = self._retriever.invoke(question)
        prepared = self._turns.prepare(messages, documents, request)
        with prepared.turn.asking():
            response = handler(self._marked(request, prepared))
        return self._finish(request, prepared, response)

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> Any:
        documents, messages = None, _messages_of(request)
        if (question := self._question(messages)) is not None and self._retriever is not None:
            documents = await self._retriever.ainvoke(question)
        prepared = await self._turns.aprepare(messages, documents, request)
        with prepared.turn.asking():
            response = await handler(self._marked(request, prepared))
        return self._finish(request, prepared, response)

    def _question(self, messages: Sequence[BaseMessage]) -> str | None:
        last = messages[-1] if messages else None
        return text_of(last) if isinstance(last, HumanMessage) else None

    def _marked(self, request: ModelRequest, prepared: Prepared) -> ModelRequest:
        front = _system(request)
        messages, arguments = marked(prepared.messages, prepared.turn, self._marks)
        changes: dict[str, Any] = {"messages": messages[len(front) :]}
        # Before langchain 1.1 the system prompt was a text without breakpoints.
        if front and messages[0] is not front[0] and hasattr(request, "system_message"):
            changes["system_message"] = messages[0]
        if arguments:
            changes["model_settings"] = arguments | request.model_settings
        return request.override(**changes)

    def _finish(self, request: ModelRequest, prepared: Prepared, response: ModelResponse) -> Any:
        answer = next((each for each in response.result if isinstance(each, BaseMessage)), None)
        if answer is not None:
            self._turns.answered(prepared, answer)
        # The graph replaces messages that have the same id. Another one, which an outer middleware added to this call
        # alone, would be appended.
        stored = {getattr(each, "id", None) for each in (request.state or {}).get("messages", ())}
        changed = [each for each in prepared.changed if each.id is not None and each.id in stored]
        if not changed:
            return response
        extended = getattr(types, "ExtendedModelResponse", None)
        if extended is not None:
            return extended(response, Command(update={"messages": changed}))
        # Before langchain 1.2.
        return replace(response, result=[*response.result, *changed])


def _messages_of(request: Any) -> list[BaseMessage]:
    given = [*_system(request), *request.messages]
    try:
        # Other middleware may add what the model converts, such as a dict.
        return convert_to_messages(given)
    except Exception:
        # The model refuses it.
        return given


def _system(request: Any) -> list[BaseMessage]:
    message = getattr(request, "system_message", None)
    if isinstance(message, SystemMessage):
        return [message]
    text = getattr(request, "system_prompt", None)
    return [SystemMessage(text)] if isinstance(text, str) else []
