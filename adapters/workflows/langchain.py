"""LangChain: retriever for workflows on a shared server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder.common.extras import needs

with needs("langchain", "ragorder.adapters.workflows.langchain"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

from pydantic import ConfigDict, SkipValidation

import ragorder
from ragorder.adapters.workflows.shared import SharedWorkflows
from ragorder.pipelining.workflow import CompiledGraph, WorkflowResult

__all__ = ["WorkflowRetriever"]


class WorkflowRetriever(BaseRetriever):
    """Retriever of the documents that a workflow finds, best first. Thread-safe. Raises the server's errors.

        retriever = WorkflowRetriever(workflows=workflows, graph=hyde().compile())

    - `documents`: their name in the workflow's state.
    - `convert`: maps the workflow's document to LangChain's (default: from a `ragorder.Document`).
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
        return self._found(self.workflows.run(self.graph, query, state=self.state, scope=self.scope))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self._found(await self.workflows.arun(self.graph, query, state=self.state, scope=self.scope))

    def _found(self, result: WorkflowResult) -> list[Document]:
        found: Sequence[Any] = result.state[self.documents]
        return [(self.convert or _document)(document) for document in found]


def _document(document: ragorder.Document) -> Document:
    return Document(document.text, id=document.id, metadata=dict(document.metadata))
