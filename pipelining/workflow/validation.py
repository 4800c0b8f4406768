"""Checks of a graph before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from ragorder.pipelining.workflow.edges import Edge
from ragorder.pipelining.workflow.nodes import END, START, Generation, Node, NodeId, Retrieval, Step, Terminal
from ragorder.pipelining.workflow.state import QUESTION
from ragorder.pipelining.workflow.templates import fields, query_fields
from ragorder.pipelining.workflow.topology import Topology

__all__ = ["answer_name", "edge_problem", "node_problem", "problems", "with_documents"]

Edges = Mapping[NodeId | Terminal, Sequence[Edge]]


def node_problem(node: Node) -> str | None:
    """What is wrong with a node by itself."""
    if isinstance(node.id, Terminal) or callable(node.id):
        return f"a node's id must be a name or a number, got {node.id!r}"
    for name in (*_reads_declared(node), *node.writes):
        if not isinstance(name, str) or not name.isidentifier():
            return f"node {node.id!r}: {name!r} cannot be a name of the state: use letters, digits and underscores"
    limit = {Generation: "max_tokens", Retrieval: "topk"}.get(type(node))
    if limit is not None and (type(value := getattr(node, limit)) is not int or value < 1):
        return f"node {node.id!r}: {limit} must be an integer of at least 1, got {value!r}"
    if isinstance(node, Step) and not callable(node.function):
        return f"node {node.id!r}: a step needs a function, got {type(node.function).__name__}"
    try:
        reads(node)
    except (ValueError, TypeError) as error:
        return f"node {node.id!r}: {error}"
    return None


def edge_problem(edge: Edge, to: Sequence[object]) -> str | None:
    if edge.source is END:
        return "an edge cannot leave END"
    if START in edge.targets:
        return f"the edge from {edge.source!r} leads to START; name the first node instead"
    if edge.choose is None and to:
        return f"the edge from {edge.source!r} has a fixed target: `to` is for a function"
    return None


def reads(node: Node) -> frozenset[str]:
    """Names without which a node fails, as far as they are known. Raises ValueError for a template that has a wrong
    field."""
    if isinstance(node, Generation):
        return fields(node.prompt) | frozenset(node.documents)
    return query_fields(node.query) if isinstance(node, Retrieval) else frozenset(node.reads)


def with_documents(nodes: Mapping[NodeId, Node]) -> dict[NodeId, Node]:
    """Generations without `documents` whose template names the output of a retrieval show that."""
    retrieved = {node.output for node in nodes.values() if isinstance(node, Retrieval)}
    return {
        id: replace(node, documents=tuple(sorted(fields(node.prompt) & retrieved)))
        if isinstance(node, Generation) and not node.documents
        else node
        for id, node in nodes.items()
    }


def problems(
    nodes: Mapping[NodeId, Node], edges: Edges, topology: Topology, inputs: Sequence[str], max_rounds: int | None
) -> Iterator[str]:
    """What is wrong, the most basic first; later checks assume that earlier ones found nothing."""
    yield from _loose_ends(nodes, edges)
    yield from _unreachable(nodes, topology)
    yield from _endless(nodes, edges, topology, max_rounds)
    yield from _missing_inputs(nodes, topology, inputs)
    yield from _entered_twice(nodes, topology)
    yield from _parallel_writers(nodes, topology)


def answer_name(nodes: Mapping[NodeId, Node], edges: Edges, answer: str | None) -> str:
    """Raises ValueError if there is none, or several."""
    written = {name for node in nodes.values() for name in node.writes}
    if answer is not None:
        if answer not in written:
            raise ValueError(f"answer={answer!r} is written by no node; {_known(written)}")
        return answer
    last = {node.output: id for id, node in nodes.items() if isinstance(node, Generation) and _ends(id, nodes, edges)}
    if len(last) != 1:
        found = "no generation comes last" if not last else f"several generations come last, with {_listed(last)}"
        raise ValueError(f"{found}: say which is the result, compile(answer=…)")
    return next(iter(last))


def _ends(id: NodeId, nodes: Mapping[NodeId, Node], edges: Edges) -> bool:
    """Without another generation in between."""
    seen: set[NodeId | Terminal] = {id}
    waiting: list[NodeId | Terminal] = [id]
    while waiting:
        for edge in edges[waiting.pop()]:
            for target in edge.targets:
                if target is END:
                    return True
                if target not in seen and not isinstance(nodes[target], Generation):
                    seen.add(target)
                    waiting.append(target)
    return False


def _reads_declared(node: Node) -> tuple[str, ...]:
    return node.documents if isinstance(node, Generation) else node.reads if isinstance(node, Step) else ()


def _loose_ends(nodes: Mapping[NodeId, Node], edges: Edges) -> Iterator[str]:
    if START not in edges:
        yield "nothing comes first: add_edge(START, …)"
    for source, out in edges.items():
        for place in (source, *(target for edge in out for target in edge.targets)):
            if place not in nodes and place not in (START, END):
                meant = f"give the constant {place}, without quotes" if place in ("START", "END") else _known(nodes)
                yield f"an edge names {place!r}, which is no node; {meant}"
    for id in nodes:
        if id not in edges:
            yield f"nothing comes after node {id!r}: add_edge({id!r}, END)"


def _unreachable(nodes: Mapping[NodeId, Node], topology: Topology) -> Iterator[str]:
    reached = topology.reached()
    if lost := [id for id in nodes if id not in reached]:
        yield f"no way leads from START to {_listed(lost)}"


def _endless(nodes: Mapping[NodeId, Node], edges: Edges, topology: Topology, max_rounds: int | None) -> Iterator[str]:
    ending = topology.leads_to_end()
    if lost := [id for id in nodes if id not in ending]:
        yield f"no way leads to END from {_listed(lost)}"
    certain = Topology(
        {source: [edge.targets for edge in out if len(edge.targets) == 1] for source, out in edges.items()}
    )
    for loop in certain.loops:
        through = _listed(_in_order(nodes, loop.nodes))
        yield f"the loop through {through} never ends: one of its edges must be conditional"
    if max_rounds is not None and (type(max_rounds) is not int or max_rounds < 1):
        yield f"max_rounds must be an integer of at least 1, got {max_rounds!r}"
    if topology.back and max_rounds is None:
        source, target = topology.back[0]
        yield (
            f"a loop leads from {source!r} back to {target!r}: bound it with compile(max_rounds=…), or, if there is no "
            "loop, say with `to` where the conditional edges lead"
        )


def _missing_inputs(nodes: Mapping[NodeId, Node], topology: Topology, inputs: Sequence[str]) -> Iterator[str]:
    given = {*QUESTION, *inputs}
    for id, node in nodes.items():
        before = topology.reached(without=id)
        there = given | {
            name
            for other in nodes.values()
            if other.id in before and id in topology.later(other.id)
            for name in other.writes
        }
        for name in sorted(reads(node) - there):
            written = {name for node in nodes.values() for name in node.writes}
            state = "is written only after it" if name in written else "is written by no node"
            yield f"node {id!r} reads {name!r}, which {state} and is no input; {_known(there, name)}"


def _entered_twice(nodes: Mapping[NodeId, Node], topology: Topology) -> Iterator[str]:
    for loop in (loop for loop in topology.loops if len(loop.heads) > 1):
        for pair, source in topology.parallel.items():
            entered = {place for place, _ in pair}
            if entered <= loop.heads:
                yield (
                    f"branches that part after {source!r} enter the loop of {_listed(_in_order(nodes, loop.nodes))} at "
                    f"{_listed(_in_order(nodes, entered))}, and which of these is to wait for the other is not clear: "
                    "lead them to one node first, or repeat a node under another id"
                )


def _parallel_writers(nodes: Mapping[NodeId, Node], topology: Topology) -> Iterator[str]:
    for (one, other), source in topology.parallel.items():
        if topology.awaits(one, other) or topology.awaits(other, one):
            continue
        pair = _in_order(nodes, (one[0], other[0]))
        for name in set(nodes[pair[0]].writes) & set(nodes[pair[1]].writes):
            yield (
                f"{_listed(pair)} may run side by side after {source!r} and both write {name!r}: give them two "
                "names, or say with `to` where conditional edges lead"
            )


def _in_order(nodes: Mapping[NodeId, Node], some: Collection[object]) -> list[NodeId]:
    return [id for id in nodes if id in some]


def _listed(names: object) -> str:
    return ", ".join(repr(name) for name in names)  # type: ignore[attr-defined]


def _known(names: object, wanted: object = None) -> str:
    listed = sorted(map(str, names))  # type: ignore[call-overload]
    close = get_close_matches(str(wanted), listed, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are {_listed(listed)}"
