"""LangGraph: node for workflows on a shared server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ragorder.common.extras import needs

with needs("langchain", "ragorder.adapters.workflows.langgraph"):
    from langchain_core.runnables import RunnableLambda

from ragorder.adapters.workflows.shared import SharedWorkflows
from ragorder.pipelining.workflow import CompiledGraph, WorkflowResult

__all__ = ["workflow_node"]


def workflow_node(
    workflows: SharedWorkflows,
    graph: CompiledGraph,
    *,
    question: str | Callable[[Any], str] = "question",
    answer: str | Callable[[WorkflowResult], Any] = "answer",
    inputs: Sequence[str] = (),
    scope: Callable[[Any], Hashable] | None = None,
) -> RunnableLambda[Any, Any]:
    """Return a node for `StateGraph.add_node`, in `invoke` and `ainvoke`.

        builder.add_node("research", workflow_node(workflows, multistep().compile()))

    - `question`: its name in LangGraph's state, or a function of the state.
    - `answer`: the name under which the answer's text is stored, or a function from the result to the update.
    - `inputs`: names that are passed on as the graph's `inputs`.
    - `scope`: the tenant, a function of the state.

    Raises the server's errors, KeyError for a name that the state lacks.
    """

    def arguments(state: Any) -> dict[str, Any]:
        asked = question(state) if callable(question) else _read(state, question)
        given = {name: _read(state, name) for name in inputs}
        return {"question": asked, "state": given, "scope": None if scope is None else scope(state)}

    def update(result: WorkflowResult) -> Any:
        return answer(result) if callable(answer) else {answer: result.text}

    def call(state: Any) -> Any:
        return update(workflows.run(graph, **arguments(state)))

    async def acall(state: Any) -> Any:
        return update(await workflows.arun(graph, **arguments(state)))

    return RunnableLambda(call, acall, name=graph.name)


def _read(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, Mapping) else getattr(state, name)
