"""Result of a workflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from ragorder.pipelining.workflow.errors import NodeError
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.state import State

__all__ = ["WorkflowResult"]


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """`text` is the graph's answer, `state` everything that its nodes have written, `trace` how the request ran (None:
    stage by stage)."""

    text: str = field(repr=False)
    state: State = field(repr=False)
    trace: Any = None

    @classmethod
    def of(cls, graph: CompiledGraph, state: State, trace: Any = None) -> Self:
        """Raises NodeError if no branch that was taken has written the answer."""
        if graph.answer not in state:
            raise NodeError(graph.name, "END", f"no node on the way has written the answer, {graph.answer!r}")
        value = state[graph.answer]
        return cls(value if isinstance(value, str) else str(value), state, trace)
