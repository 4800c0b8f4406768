"""Flowcharts of graphs in Mermaid's notation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragorder.pipelining.workflow.edges import Edge
from ragorder.pipelining.workflow.nodes import END, START, Generation, Node, NodeId, Retrieval, Terminal

__all__ = ["flowchart"]


def flowchart(nodes: Mapping[NodeId, Node], edges: Mapping[NodeId | Terminal, Sequence[Edge]]) -> str:
    names: dict[NodeId | Terminal, str] = {START: "START", END: "END_"}
    names |= {id: f"n{number}" for number, id in enumerate(nodes)}
    lines = ["flowchart TD", "    START((START))", "    END_((END))"]
    lines += [f"    {names[id]}{_shape(node)}" for id, node in nodes.items()]
    for source, out in edges.items():
        for edge in out:
            arrow = "-->" if edge.choose is None else "-.->"
            lines += [f"    {names[source]} {arrow} {names[target]}" for target in edge.targets]
    return "\n".join(lines) + "\n"


def _shape(node: Node) -> str:
    label = f'"{_escaped(str(node.id))}: {", ".join(node.writes)}"'
    if isinstance(node, Generation):
        return f"[{label}]"
    return f"[({label})]" if isinstance(node, Retrieval) else f"[/{label}/]"


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() or char in " _-." else f"#{ord(char)};" for char in text)
