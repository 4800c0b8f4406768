"""Edges of a workflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragorder.pipelining.workflow.nodes import NodeId, Terminal
from ragorder.pipelining.workflow.state import State

__all__ = ["Choice", "Edge"]

Choice = Callable[[State], NodeId | Terminal]


@dataclass(frozen=True, slots=True)
class Edge:
    """To its one target, or to that of `targets` which `choose` returns (empty: any)."""

    source: NodeId | Terminal
    targets: tuple[NodeId | Terminal, ...]
    choose: Choice | None = None

    def target(self, state: State) -> NodeId | Terminal:
        return self.targets[0] if self.choose is None else self.choose(state)

    def resolved(self, everywhere: tuple[NodeId | Terminal, ...]) -> Edge:
        return self if self.targets else Edge(self.source, everywhere, self.choose)
