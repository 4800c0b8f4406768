"""Turn of a conversation as a chain step or graph node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
    message_chunk_to_message,
)
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import AddableDict

from ragorder.adapters.langchain.conversation import LangChainTurns, Prepared
from ragorder.adapters.langchain.marks import Marks, checked_marks, marked
from ragorder.adapters.reorder import ScopeOf
from ragorder.adapters.turns import Label
from ragorder.conversation import REFERENCE, Repeat
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike


@dataclass(slots=True, eq=False)
class _Asked:
    request: Prepared
    messages: list[BaseMessage]
    stored: list[BaseMessage]
    arguments: dict[str, Any]


class CacheOrderTurn(Runnable[dict[str, Any], dict[str, Any]]):
    """Next turn of a conversation: documents follow the unchanged history. Thread-safe.

        found = create_history_aware_retriever(llm, retriever, rephrase)
        chain = RunnablePassthrough.assign(context=found) | CacheOrderTurn(llm, orderer, builder=builder)
        result = chain.invoke({"input": question, "chat_history": history})
        history += result["messages"]

    The input has `context`, the documents, and either `input` and `chat_history`, or `messages` that end with the
    question (a LangGraph node). The result has `messages`, to store unchanged; `answer`, the last of them; and
    `sources`, the documents.

    - `model`: a chat model; it needs no `FeedbackHandler`.
    - `builder`: its system prompt comes first, if the history has none.
    - `repeat`, `reference`: as for `PromptBuilder.turn`.
    - `label`: cites and names a Document (default: `number_label` of its text).
    - `scope`: the tenant, or a function of the input. A string is the `cache_salt`.
    - `marks`: send a cloud orderer's cache breakpoints: True for ChatAnthropic, "openai" for ChatOpenAI, "bedrock" for
      ChatBedrockConverse.

    Errors in these functions are counted and leave retrieval order. Raises TypeError, ValueError.
    """

    def __init__(
        self,
        model: Runnable[Any, Any],
        orderer: OrdererLike,
        *,
        builder: PromptBuilder | None = None,
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        label: Label | None = None,
        scope: ScopeOf = None,
        marks: Marks = False,
    ) -> None:
        if not isinstance(model, Runnable):
            raise TypeError(f"model is a {type(model).__name__}: give a chat model, such as ChatOpenAI(…)")
        self._model = model
        self._marks = checked_marks(marks)
        self._turns = LangChainTurns(
            orderer, builder, label=label, scope=scope, repeat=repeat, reference=reference, parts=bool(marks)
        )

    def label(self, document: Document) -> str:
        """Return a document's label, as `cited(answer, sources, turn.label)` calls it."""
        return self._turns.label(document)

    def questions(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """Return a history without documents, for rephrasing a question."""
        return self._turns.questions(messages)

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def stream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Stream chunks of the `answer`, then the rest of the result."""
        yield from self._transform_stream_with_config(iter([input]), self._chunks, config, **kwargs)

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        async def inputs() -> AsyncIterator[dict[str, Any]]:
            yield input

        async for chunk in self._atransform_stream_with_config(inputs(), self._achunks, config, **kwargs):
            yield chunk

    def _answer(
        self, input: dict[str, Any], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> dict[str, Any]:
        asked = self._ask(input)
        with asked.request.turn.asking():
            answer = self._model.invoke(asked.messages, config, **(asked.arguments | kwargs))
        return {"answer": answer, **self._result(asked, answer)}

    async def _aanswer(
        self, input: dict[str, Any], run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> dict[str, Any]:
        asked = await self._aask(input)
        with asked.request.turn.asking():
            answer = await self._model.ainvoke(asked.messages, config, **(asked.arguments | kwargs))
        return {"answer": answer, **self._result(asked, answer)}

    def _chunks(
        self,
        inputs: Iterator[dict[str, Any]],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        asked = self._ask(next(inputs))
        answer: Any = None
        with asked.request.turn.asking():
            for chunk in self._model.stream(asked.messages, config, **(asked.arguments | kwargs)):
                if _computed(chunk):
                    asked.request.turn.begin()
                answer = chunk if answer is None else answer + chunk
                yield AddableDict({"answer": chunk})
        yield AddableDict(self._result(asked, _whole(answer)))

    async def _achunks(
        self,
        inputs: AsyncIterator[dict[str, Any]],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        asked = await self._aask(await anext(inputs))
        answer: Any = None
        with asked.request.turn.asking():
            async for chunk in self._model.astream(asked.messages, config, **(asked.arguments | kwargs)):
                if _computed(chunk):
                    asked.request.turn.begin()
                answer = chunk if answer is None else answer + chunk
                yield AddableDict({"answer": chunk})
        yield AddableDict(self._result(asked, _whole(answer)))

    def _result(self, asked: _Asked, answer: BaseMessage) -> dict[str, Any]:
        self._turns.answered(asked.request, answer)
        return {"messages": [*asked.stored, answer], "sources": asked.request.sources}

    def _ask(self, input: Mapping[str, Any]) -> _Asked:
        messages, sent_before = _read(input)
        request = self._turns.prepare(messages, list(input.get("context") or ()), input, sent_before=sent_before or 0)
        return self._asked(request, sent_before)

    async def _aask(self, input: Mapping[str, Any]) -> _Asked:
        messages, sent_before = _read(input)
        documents = list(input.get("context") or ())
        return self._asked(
            await self._turns.aprepare(messages, documents, input, sent_before=sent_before or 0), sent_before
        )

    def _asked(self, request: Prepared, sent_before: int | None) -> _Asked:
        sent, system = request.messages, self._turns.system
        stored = request.changed if sent_before is None else sent[sent_before:]
        front = [SystemMessage(system)] if system and not (sent and isinstance(sent[0], SystemMessage)) else []
        messages, arguments = marked([*front, *sent], request.turn, self._marks)
        return _Asked(request, messages, stored, arguments)


def _read(input: Mapping[str, Any]) -> tuple[list[BaseMessage], int | None]:
    if "messages" in input:
        return convert_to_messages(input["messages"]), None
    question = input["input"]
    history = convert_to_messages(input.get("chat_history") or [])
    asked = HumanMessage(question) if isinstance(question, str) else convert_to_messages([question])[0]
    return [*history, asked], len(history)


def _computed(chunk: Any) -> bool:
    return any(getattr(chunk, name, None) for name in ("content", "tool_call_chunks", "additional_kwargs"))


def _whole(answer: Any) -> BaseMessage:
    if answer is None:
        return AIMessage("")
    return message_chunk_to_message(answer) if isinstance(answer, AIMessageChunk) else answer
