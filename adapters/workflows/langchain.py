"""LangChain's retriever and LangGraph's node for workflows on a shared server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field, SkipValidation

import ragorder
from ragorder.adapters.workflows.shared import SharedWorkflows
from ragorder.common.extras import needs
from ragorder.pipelining.workflow import CompiledGraph, RunOptions, WorkflowResult

__all__ = ["WorkflowRetriever", "workflow_node"]

with needs("langchain", "ragorder.adapters.workflows.langchain"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableConfig, RunnableLambda

    from ragorder.adapters.langchain.payloads import text_of


class WorkflowRetriever(BaseRetriever):
    """Retriever of the documents that a workflow finds, best first, without an answer. Thread-safe.

        retriever = WorkflowRetriever(workflows=workflows, graph=hyde().compile())

    - `documents`: their name in the workflow's state.
    - `convert`: makes LangChain's documents (default: from `ragorder.Document`).
    - `state`: values of the graph's `inputs`.
    - `scope`: the tenant.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    workflows: SkipValidation[SharedWorkflows]
    graph: SkipValidation[CompiledGraph]
    documents: str = "docs"
    convert: Callable[[Any], Document] | None = None
    state: Mapping[str, Any] | None = None
    scope: str | None = None

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self._found(self.workflows.run(self.graph, query, **self._options()))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self._found(await self.workflows.arun(self.graph, query, **self._options()))

    def _options(self) -> RunOptions:
        return {"state": self.state, "scope": self.scope, "until": self.documents}

    def _found(self, result: WorkflowResult) -> list[Document]:
        found: Sequence[Any] = result.state[self.documents]
        return [(self.convert or _document)(document) for document in found]


def _document(document: ragorder.Document) -> Document:
    return Document(document.text, id=document.id, metadata=dict(document.metadata))


class _WorkflowModel(BaseChatModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    workflows: SkipValidation[SharedWorkflows]
    graph: SkipValidation[CompiledGraph]
    options: dict[str, Any]
    results: list[Any] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "ragorder-workflow"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self._answer(self.workflows.run(self.graph, text_of(messages[-1]), **self.options))

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self._answer(await self.workflows.arun(self.graph, text_of(messages[-1]), **self.options))

    def _stream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        for piece in self.workflows.stream(self.graph, text_of(messages[-1]), **self.options):
            yield self._chunk(piece)

    async def _astream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self.workflows.astream(self.graph, text_of(messages[-1]), **self.options):
            yield self._chunk(piece)

    def _answer(self, result: WorkflowResult) -> ChatResult:
        self.results.append(result)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=result.text))])

    def _chunk(self, piece: str | WorkflowResult) -> ChatGenerationChunk:
        if isinstance(piece, str):
            return ChatGenerationChunk(message=AIMessageChunk(content=piece))
        self.results.append(piece)
        return ChatGenerationChunk(message=AIMessageChunk(content="", chunk_position="last"))


def workflow_node(
    workflows: SharedWorkflows,
    graph: CompiledGraph,
    *,
    question: str | Callable[[Any], str] = "question",
    answer: str | Callable[[WorkflowResult], Any] = "answer",
    inputs: Sequence[str] = (),
    scope: Callable[[Any], Hashable] | None = None,
) -> RunnableLambda[Any, Any]:
    """Return a node for `StateGraph.add_node`.

        builder.add_node("research", workflow_node(workflows, multistep().compile()))

    - `question`: its name in LangGraph's state, or a function of the state.
    - `answer`: name for the answer's text, or a function from the result to the update.
    - `inputs`: names in LangGraph's state whose values are the graph's `inputs`.
    - `scope`: the tenant, a function of the state.

    LangGraph's `stream_mode="messages"` yields the answer's text as it is generated. Raises the server's errors,
    KeyError for a name that the state lacks.
    """

    def ask(state: Any) -> tuple[_WorkflowModel, list[BaseMessage]]:
        asked = question(state) if callable(question) else _read(state, question)
        given = {name: _read(state, name) for name in inputs}
        options = {"state": given, "scope": None if scope is None else scope(state)}
        # Without LangChain's global cache, which knows neither state nor scope.
        model = _WorkflowModel(workflows=workflows, graph=graph, options=options, cache=False, name=graph.name)
        return model, [HumanMessage(asked)]

    def update(model: _WorkflowModel) -> Any:
        (result,) = model.results
        return answer(result) if callable(answer) else {answer: result.text}

    def call(state: Any, config: RunnableConfig) -> Any:
        model, messages = ask(state)
        model.invoke(messages, config)
        return update(model)

    async def acall(state: Any, config: RunnableConfig) -> Any:
        model, messages = ask(state)
        await model.ainvoke(messages, config)
        return update(model)

    return RunnableLambda(call, acall, name=graph.name)


def _read(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, Mapping) else getattr(state, name)
