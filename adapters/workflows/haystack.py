"""Haystack: component for workflows on a shared server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragorder.common.extras import needs

with needs("haystack", "ragorder.adapters.workflows.haystack"):
    from haystack import Document, component
    from haystack.core.errors import SerializationError

import ragorder
from ragorder.adapters.workflows.shared import SharedWorkflows
from ragorder.pipelining.workflow import CompiledGraph, WorkflowResult

__all__ = ["WorkflowComponent"]


@component
class WorkflowComponent:
    """Component that answers queries by a workflow. Thread-safe, not serialisable.

        pipeline.add_component("research", WorkflowComponent(workflows, multistep().compile()))

    - `documents`: their name in the workflow's state, which may lack it.
    - `convert`: makes Haystack's documents (default: from `ragorder.Document`).
    - `scope`: the tenant.
    """

    def __init__(
        self,
        workflows: SharedWorkflows,
        graph: CompiledGraph,
        *,
        documents: str = "docs",
        convert: Callable[[Any], Document] | None = None,
        scope: str | None = None,
    ) -> None:
        self.workflows = workflows
        self.graph = graph
        self.documents = documents
        self.convert = convert or _document
        self.scope = scope

    def to_dict(self) -> dict[str, Any]:
        raise SerializationError("a WorkflowComponent belongs to a server in this process: add it after loading")

    @component.output_types(replies=list[str], documents=list[Document])
    def run(self, query: str, state: Mapping[str, Any] | None = None, scope: str | None = None) -> dict[str, list[Any]]:
        """`state`: values of the graph's `inputs`. `scope` overrides the component's."""
        return self._output(self.workflows.run(self.graph, query, state=state, scope=self._scope(scope)))

    @component.output_types(replies=list[str], documents=list[Document])
    async def run_async(
        self, query: str, state: Mapping[str, Any] | None = None, scope: str | None = None
    ) -> dict[str, list[Any]]:
        return self._output(await self.workflows.arun(self.graph, query, state=state, scope=self._scope(scope)))

    def _scope(self, scope: str | None) -> str | None:
        return self.scope if scope is None else scope

    def _output(self, result: WorkflowResult) -> dict[str, list[Any]]:
        found = result.state.get(self.documents, ())
        return {"replies": [result.text], "documents": [self.convert(document) for document in found]}


def _document(document: ragorder.Document) -> Document:
    return Document(id=document.id, content=document.text, meta=dict(document.metadata), score=document.score)
