"""Workflow graphs (HedraRAG 4.1, RAGraph)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from ragorder.pipelining.workflow.nodes import (
    END,
    START,
    Choice,
    Edge,
    Generation,
    GraphError,
    Node,
    NodeError,
    NodeId,
    Retrieval,
    State,
    Step,
    Terminal,
)
from ragorder.pipelining.workflow.result import WorkflowResult
from ragorder.pipelining.workflow.topology import (
    Topology,
    answer_name,
    edge_problem,
    node_problem,
    problems,
    with_documents,
)


class RAGraph:
    """A workflow of generations, retrievals and plain steps.

        graph = RAGraph("hyde")
        graph.add_generation("guess", prompt="Write a passage that answers {query}", output="passage")
        graph.add_retrieval("search", query="passage", topk=5)
        graph.add_generation("answer", prompt="Answer {query} using {docs}.")
        graph.add_edge(START, "guess").add_edge("guess", "search").add_edge("search", "answer").add_edge("answer", END)
        compiled = graph.compile()

    - The user's question is {query} or {input}. `inputs`: further names that each run's state must have.
    - `max_rounds`: the most runs of a node in a request, required by a graph with a loop.
    - Successors of a node run in parallel. Where branches meet, a node runs once (in a loop, once a round), after all
      branches that can still reach it.
    """

    def __init__(
        self, name: str = "workflow", *, inputs: str | Iterable[str] = (), max_rounds: int | None = None
    ) -> None:
        self.name = name
        self.inputs = _names(inputs)
        self.max_rounds = max_rounds
        self._nodes: dict[NodeId, Node] = {}
        self._edges: list[Edge] = []

    def add_generation(
        self,
        id: NodeId,
        *,
        prompt: str | Callable[[State], str],
        output: str = "answer",
        documents: str | Sequence[str] | None = None,
        parse: Callable[[str, State], Any] | None = None,
        max_tokens: int = 256,
        **options: Any,
    ) -> Self:
        """`documents`: the state's names of documents that the prompt shows, by default the outputs of retrievals that
        the template names. `options` go to the engine; temperature is 0.0 by default."""
        names = _names(documents)
        return self._add(Generation(id, prompt, output, names, parse, max_tokens, MappingProxyType(options)))

    def add_retrieval(
        self, id: NodeId, *, query: str | Callable[[State], str], topk: int = 5, output: str = "docs"
    ) -> Self:
        return self._add(Retrieval(id, query, topk, output))

    def add_step(
        self,
        id: NodeId,
        function: Callable[[State], Any],
        *,
        reads: str | Sequence[str] = (),
        writes: str | Sequence[str] = (),
        pure: bool = False,
    ) -> Self:
        return self._add(Step(id, function, _names(reads), _names(writes), pure))

    def add_edge(
        self,
        source: NodeId | Terminal,
        target: NodeId | Terminal | Choice,
        *,
        to: NodeId | Terminal | Sequence[NodeId | Terminal] = (),
    ) -> Self:
        """Add an edge, conditional if `target` is a function of the state, which runs on the event loop and must be
        quick. `to`: what it may return (default: any node or END)."""
        to = _as_tuple(to)
        edge = Edge(source, to, target) if callable(target) else Edge(source, (target,))
        problem = edge_problem(edge, to)
        if problem is not None:
            raise GraphError(f"workflow {self.name!r}: {problem}")
        self._edges.append(edge)
        return self

    def compile(self, max_rounds: int | None = None, *, answer: str | None = None) -> CompiledGraph:
        """Check the graph and return it ready to run. `answer`: the state's name of the result, by default the output
        of the last generations. Raises GraphError."""
        max_rounds = self.max_rounds if max_rounds is None else max_rounds
        edges: dict[NodeId | Terminal, tuple[Edge, ...]] = {}
        everywhere = (*self._nodes, END)
        for edge in self._edges:
            edges[edge.source] = (*edges.get(edge.source, ()), edge.resolved(everywhere))
        nodes = with_documents(self._nodes)
        topology = Topology({source: [edge.targets for edge in out] for source, out in edges.items()})
        for problem in problems(nodes, edges, topology, self.inputs, max_rounds):
            raise GraphError(f"workflow {self.name!r}: {problem}")
        try:
            result = answer_name(nodes, edges, answer)
        except ValueError as error:
            raise GraphError(f"workflow {self.name!r}: {error}") from None
        return CompiledGraph(
            self.name, MappingProxyType(nodes), MappingProxyType(edges), max_rounds, result, self.inputs, topology
        )

    def _add(self, node: Node) -> Self:
        problem = f"two nodes {node.id!r}" if node.id in self._nodes else node_problem(node)
        if problem is not None:
            raise GraphError(f"workflow {self.name!r}: {problem}")
        self._nodes[node.id] = node
        return self


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGraph:
    """A checked graph, for any number of requests."""

    name: str
    nodes: Mapping[NodeId, Node]
    edges: Mapping[NodeId | Terminal, tuple[Edge, ...]] = field(repr=False)
    max_rounds: int | None
    answer: str
    inputs: tuple[str, ...]
    topology: Topology = field(repr=False)

    def begin(self, question: str, values: Mapping[str, Any] | None = None) -> State:
        values = values or {}
        if missing := [name for name in self.inputs if name not in values]:
            raise GraphError(f"workflow {self.name!r}: give {', '.join(map(repr, missing))} in `state`")
        if unknown := [name for name in values if name not in self.inputs]:
            raise GraphError(
                f"workflow {self.name!r}: {', '.join(map(repr, unknown))} in `state`: name them, RAGraph(inputs=…)"
            )
        return State.of(question, values)

    def result(self, state: State, trace: Any = None, until: str | None = None) -> WorkflowResult:
        """Raises NodeError if no node has written the answer, or the name `until`."""
        wanted = self.answer if until is None else until
        if wanted not in state:
            what = "the answer, " if until is None else ""
            raise NodeError(self.name, "END", f"no node on the way has written {what}{wanted!r}")
        value = state.get(self.answer, "")
        return WorkflowResult(value if isinstance(value, str) else str(value), state, trace)

    def successors(self, id: NodeId | Terminal, state: State) -> tuple[NodeId | Terminal, ...]:
        targets: dict[NodeId | Terminal, None] = {}
        for edge in self.edges[id]:
            target = edge.target(state)
            if target not in edge.targets:
                allowed = ", ".join(map(repr, edge.targets))
                kind = repr(target) if target in tuple(self.nodes) else f"a {type(target).__name__} that is no node"
                raise GraphError(
                    f"workflow {self.name!r}: the conditional edge from {id!r} returned {kind}; it may return {allowed}"
                )
            targets[target] = None
        return tuple(targets)

    def next_nodes(self, id: NodeId | Terminal) -> tuple[NodeId, ...]:
        targets = dict.fromkeys(target for edge in self.edges[id] for target in edge.targets)
        return tuple(target for target in targets if target is not END)

    def leads_to(self, id: NodeId, name: str | None) -> bool:
        """Return whether this node or a later one writes the name (None: True)."""
        later = self.topology.later(id)
        return name is None or any(
            name in node.writes for node in self.nodes.values() if node.id == id or node.id in later
        )

    def to_mermaid(self) -> str:
        return _flowchart(self.nodes, self.edges)


def checked_graph(graph: CompiledGraph | RAGraph) -> CompiledGraph:
    if isinstance(graph, RAGraph):
        raise GraphError(f"workflow {graph.name!r}: compile() the graph first, and run what that returns")
    return graph


def _as_tuple(vertices: Any) -> tuple[NodeId | Terminal, ...]:
    return (vertices,) if isinstance(vertices, str) or not isinstance(vertices, Iterable) else tuple(vertices)


def _names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _flowchart(nodes: Mapping[NodeId, Node], edges: Mapping[NodeId | Terminal, Sequence[Edge]]) -> str:
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
