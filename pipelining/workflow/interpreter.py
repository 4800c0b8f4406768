"""Workflows run one node at a time: baseline and reference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.protocols import D, PipelineTrace, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.workflow.execution import answered, call_step, documents_of, found, query_of, question_of
from ragorder.pipelining.workflow.graph import CompiledGraph, checked_graph
from ragorder.pipelining.workflow.join import NodeRun, Tokens
from ragorder.pipelining.workflow.nodes import Generation, NodeError, NodeQuestion, Retrieval
from ragorder.pipelining.workflow.result import WorkflowResult


async def interpret(
    graph: CompiledGraph,
    question: str,
    *,
    engine: StreamingEngine[R],
    prompts: RequestBuilder[NodeQuestion, D, R],
    retrieve: Callable[[str, int], Awaitable[Sequence[D]]],
    state: Mapping[str, Any] | None = None,
    scope: Hashable = None,
) -> WorkflowResult:
    """Run one node after another. `retrieve` returns documents, best first. Raises GraphError and NodeError."""

    async def values_of(run: NodeRun) -> Mapping[str, Any]:
        node = run.node
        if isinstance(node, Generation):
            attempt = Attempt(engine, prompts, None, PipelineTrace(), lambda: 0.0)
            chunks = attempt.answer(question_of(node, run.state, scope), documents_of(node, run.state))
            async with aclosing(chunks):
                return answered(node, "".join([chunk.text async for chunk in chunks]), run.state)
        if isinstance(node, Retrieval):
            return found(node, await retrieve(query_of(node, run.state), node.topk))
        return await call_step(node, run.state)

    tokens = Tokens(graph, checked_graph(graph).begin(question, state))
    while runs := tokens.take():
        for run in runs:
            try:
                values = await values_of(run)
            except Exception as error:
                raise NodeError.of(graph.name, run.id, error) from error
            tokens.finish(run, values)
    return WorkflowResult.of(graph, tokens.state)
