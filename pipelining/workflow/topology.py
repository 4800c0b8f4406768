"""Static structure and checks of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import combinations

from ragorder.pipelining.workflow.nodes import (
    END,
    QUESTION,
    START,
    Edge,
    Generation,
    Node,
    NodeId,
    Retrieval,
    Step,
    Terminal,
    fields,
    query_fields,
)

Vertex = NodeId | Terminal

Position = tuple[Vertex, bool]
"""A node, and whether a branch waits there, at a loop's head, for the next round."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Nodes that all reach each other. An edge from one to one of `heads` ends a round."""

    nodes: frozenset[Vertex]
    heads: frozenset[Vertex]


class Topology:
    """`edges`: the targets of each edge of each node and START. A loop's head is where it is entered, or, of several
    such nodes, the one that surely leads to the others; else all."""

    def __init__(self, edges: Mapping[Vertex, Sequence[tuple[Vertex, ...]]]) -> None:
        self._edges = edges
        self._next: dict[Vertex, tuple[Vertex, ...]] = {
            vertex: tuple(dict.fromkeys(target for targets in out for target in targets))
            for vertex, out in edges.items()
        }
        self._certain = {vertex: [targets[0] for targets in out if len(targets) == 1] for vertex, out in edges.items()}
        self._later: dict[Vertex, frozenset[Vertex]] = {}
        self._before: dict[Vertex, frozenset[Vertex]] = {}
        self.order: dict[Vertex, int] = {vertex: rank for rank, vertex in enumerate(edges)}

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(self._loops_within([vertex for vertex in self._edges if vertex is not START]))

    @cached_property
    def back(self) -> tuple[tuple[Vertex, Vertex], ...]:
        return tuple(
            (vertex, target) for vertex, out in self._next.items() for target in out if self.ends_round(vertex, target)
        )

    def loop(self, head: Vertex) -> Loop:
        return self._headed[head]

    def ends_round(self, source: Vertex, target: Vertex) -> bool:
        loop = self._headed.get(target)
        return loop is not None and source in loop.nodes

    def later(self, vertex: Vertex) -> frozenset[Vertex]:
        """Return all that can come later: also END, and in a loop the node itself."""
        if vertex not in self._later:
            self._later[vertex] = frozenset(_reached(self._next, self._next.get(vertex, ())))
        return self._later[vertex]

    def before(self, vertex: Vertex) -> frozenset[Vertex]:
        if vertex not in self._before:
            seen: set[Vertex] = set()
            waiting = [vertex]
            while waiting:
                target = waiting.pop()
                loop = self._headed.get(target)
                around = loop.nodes if loop is not None and vertex in loop.nodes else ()
                new = [
                    source for source in self._sources.get(target, ()) if source not in seen and source not in around
                ]
                seen.update(new)
                waiting += new
            self._before[vertex] = frozenset(seen)
        return self._before[vertex]

    def awaits(self, one: Position, other: Position) -> bool:
        """Return whether one branch waits since the other can reach it; a loop's next round waits for this one."""
        (vertex, again), (other_vertex, other_again) = one, other
        loop, other_loop = self._headed.get(vertex), self._headed.get(other_vertex)
        if again and loop is not None and other_vertex in loop.nodes:
            return not (other_again and other_loop is loop)
        if other_again and other_loop is not None and vertex in other_loop.nodes:
            return False
        return other_vertex in self.before(vertex)

    @cached_property
    def parallel(self) -> Mapping[frozenset[Position], Vertex]:
        """Positions that two branches can have at once, with the node where they parted."""
        found: dict[frozenset[Position], Vertex] = {}
        waiting = [
            ((target, self.ends_round(source, target)), (beside, self.ends_round(source, beside)), source)
            for source, out in self._edges.items()
            for one, other in combinations(out, 2)
            for target in one
            for beside in other
        ]
        while waiting:
            one, other, parted = waiting.pop()
            pair = frozenset((one, other))
            if one[0] == other[0] or END in (one[0], other[0]) or pair in found:
                continue
            found[pair] = parted
            for moving, staying in ((one, other), (other, one)):
                if not self.awaits(moving, staying):
                    waiting += [
                        ((target, self.ends_round(moving[0], target)), staying, parted)
                        for target in self._next[moving[0]]
                    ]
        return found

    def reached(self, without: Vertex | None = None) -> set[Vertex]:
        return {START} | _reached(self._next, [START], without)

    def leads_to_end(self) -> set[Vertex]:
        return _reached(self._sources, [END])

    @cached_property
    def _headed(self) -> Mapping[Vertex, Loop]:
        return {head: loop for loop in self.loops for head in loop.heads}

    @cached_property
    def _sources(self) -> Mapping[Vertex, list[Vertex]]:
        sources: dict[Vertex, list[Vertex]] = {}
        for vertex, out in self._next.items():
            for target in out:
                sources.setdefault(target, []).append(vertex)
        return sources

    def _loops_within(self, vertices: Collection[Vertex]) -> Iterator[Loop]:
        inside = _within(self._next, vertices)
        later = {vertex: _reached(inside, inside[vertex]) for vertex in vertices}
        seen: set[Vertex] = set()
        for vertex in vertices:
            if vertex in later[vertex] and vertex not in seen:
                nodes = [other for other in vertices if other in later[vertex] and vertex in later[other]]
                seen.update(nodes)
                heads = self._heads(frozenset(nodes))
                yield Loop(frozenset(nodes), heads)
                yield from self._loops_within([node for node in nodes if node not in heads])

    def _heads(self, nodes: frozenset[Vertex]) -> frozenset[Vertex]:
        entered = frozenset(
            target for vertex, out in self._next.items() if vertex not in nodes for target in out if target in nodes
        )
        certain = _within(self._certain, nodes)
        first = [vertex for vertex in entered if entered <= {vertex} | _reached(certain, certain[vertex])]
        return frozenset(first) if len(first) == 1 else entered or nodes


def _within(edges: Mapping[Vertex, Iterable[Vertex]], vertices: Collection[Vertex]) -> dict[Vertex, list[Vertex]]:
    kept = frozenset(vertices)
    return {vertex: [target for target in edges.get(vertex, ()) if target in kept] for vertex in vertices}


def _reached(
    edges: Mapping[Vertex, Iterable[Vertex]], starts: Iterable[Vertex], without: Vertex | None = None
) -> set[Vertex]:
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in seen and target != without:
                seen.add(target)
                waiting.append(target)
    return seen


Edges = Mapping[NodeId | Terminal, Sequence[Edge]]


def node_problem(node: Node) -> str | None:
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
    if isinstance(node, Generation):
        return fields(node.prompt) | frozenset(node.documents)
    return query_fields(node.query) if isinstance(node, Retrieval) else frozenset(node.reads)


def with_documents(nodes: Mapping[NodeId, Node]) -> dict[NodeId, Node]:
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
    """Yield what is wrong; later checks assume that earlier ones found nothing."""
    yield from _loose_ends(nodes, edges)
    yield from _unreachable(nodes, topology)
    yield from _endless(nodes, edges, topology, max_rounds)
    yield from _missing_inputs(nodes, topology, inputs)
    yield from _entered_twice(nodes, topology)
    yield from _parallel_writers(nodes, topology)


def answer_name(nodes: Mapping[NodeId, Node], edges: Edges, answer: str | None) -> str:
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
    """Return whether END can follow without another generation."""
    through = {
        source: [target for edge in out for target in edge.targets]
        for source, out in edges.items()
        if source == id or not isinstance(nodes.get(source), Generation)
    }
    return END in _reached(through, [id])


def _reads_declared(node: Node) -> tuple[str, ...]:
    return node.documents if isinstance(node, Generation) else node.reads if isinstance(node, Step) else ()


def _loose_ends(nodes: Mapping[NodeId, Node], edges: Edges) -> Iterator[str]:
    if START not in edges:
        yield "nothing comes first: add_edge(START, …)"
    for source, out in edges.items():
        for vertex in (source, *(target for edge in out for target in edge.targets)):
            if vertex not in nodes and vertex not in (START, END):
                meant = f"give the constant {vertex}, without quotes" if vertex in ("START", "END") else _known(nodes)
                yield f"an edge names {vertex!r}, which is no node; {meant}"
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
            entered = {vertex for vertex, _ in pair}
            if entered <= loop.heads:
                yield (
                    f"branches that part after {source!r} enter the loop of {_listed(_in_order(nodes, loop.nodes))} at "
                    f"{_listed(_in_order(nodes, entered))}, and it is not clear which of them waits for the other: "
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
