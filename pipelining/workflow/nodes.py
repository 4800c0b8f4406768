"""Nodes of a workflow (HedraRAG section 4.1)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "END",
    "QUESTION",
    "START",
    "Choice",
    "Edge",
    "Generation",
    "GraphError",
    "Node",
    "NodeError",
    "NodeId",
    "NodeQuestion",
    "RefusedSearchError",
    "Retrieval",
    "State",
    "Step",
    "Terminal",
    "UnknownNameError",
    "UnusableValueError",
    "WorkflowError",
]


class WorkflowError(Exception):
    pass


class GraphError(WorkflowError, ValueError):
    """A graph that cannot be run, or an edge that led nowhere. The message names graph, node, and what to change."""


class UnknownNameError(WorkflowError, KeyError):
    """A name that the state does not have."""

    __str__ = Exception.__str__


class UnusableValueError(WorkflowError, TypeError):
    """A prompt, query or result of another type."""


class RefusedSearchError(WorkflowError, ValueError):
    """A search that the index cannot answer: a vector of another dimension, more results than it has vectors."""


class NodeError(WorkflowError, RuntimeError):
    """A node that failed in one request. The message names graph and node, never a text; `__cause__` is the failure."""

    def __init__(self, graph: str, node: object, failure: str) -> None:
        super().__init__(f"workflow {graph!r}, node {node!r}: {failure}")
        self.graph = graph
        self.node = node
        self.failure = failure

    def __reduce__(self) -> tuple[type[NodeError], tuple[str, object, str]]:
        return NodeError, (self.graph, self.node, self.failure)

    @classmethod
    def of(cls, graph: str, node: object, error: BaseException) -> NodeError:
        """To be raised from `error`, whose own message is shown only if it is ours."""
        return cls(graph, node, str(error) if isinstance(error, WorkflowError) else type(error).__name__)


QUESTION = ("input", "query")
"""The names of the user's question; HedraRAG's Listing 1 uses both."""


class State(Mapping[str, Any]):
    """Values by name, read-only. A node sees what the nodes before it have written, and nothing of those beside it."""

    __slots__ = ("_age", "_values", "_written")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})
        self._written = dict.fromkeys(self._values, 0)
        self._age = 0

    @classmethod
    def of(cls, question: str, values: Mapping[str, Any] | None = None) -> State:
        return cls(dict.fromkeys(QUESTION, question) | dict(values or {}))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise UnknownNameError(f"the state has no {name!r}, only {', '.join(self._values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        # Values are prompts and documents.
        return f"State({', '.join(self._values)})"

    @property
    def age(self) -> int:
        """Greater than that of all states which have led to this one."""
        return self._age

    def with_(self, name: str, value: Any) -> State:
        return self.updated({name: value})

    def updated(self, values: Mapping[str, Any]) -> State:
        new = State()
        new._age = self._age + 1
        new._values = self._values | dict(values)
        new._written = self._written | dict.fromkeys(values, new._age)
        return new

    @classmethod
    def joined(cls, states: Iterable[State], age: int = 0) -> State:
        """Of each name the youngest value, among equals the first state's. Values written next are younger than
        `age`."""
        first, *others = states
        if not others and first._age >= age:
            return first
        new = cls()
        new._age = age
        for state in (first, *others):
            new._age = max(new._age, state._age)
            for name, written in state._written.items():
                if written > new._written.get(name, -1):
                    new._written[name] = written
                    new._values[name] = state._values[name]
        return new


NodeId = Hashable


class Terminal(Enum):
    START = "START"
    END = "END"

    def __repr__(self) -> str:
        return self.value


START, END = Terminal.START, Terminal.END


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer of the language model, stored as `output`.

    `documents` are the state's names of the documents that the prompt shows: they come first, in an order of the
    request builder's, and where the prompt names them it reads "the documents above". `parse(text, state)` makes the
    stored value; without it, that is the text without surrounding white space.
    """

    id: NodeId
    prompt: str | Callable[[State], str]
    output: str = "answer"
    documents: tuple[str, ...] = ()
    parse: Callable[[str, State], Any] | None = None
    max_tokens: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.output,)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A search for `query` (a state's name, a template, or a function), whose `topk` best documents are stored as a
    tuple."""

    id: NodeId
    query: str | Callable[[State], str]
    topk: int = 5
    output: str = "docs"

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.output,)


@dataclass(frozen=True, slots=True)
class Step:
    """A plain function, such as a filter: it returns values for the names in `writes`. `reads` are the names that it
    cannot do without. A function that is no coroutine runs in a thread. `pure`: it has no effect but its result, and is
    quick: it may be called ahead of need, on half a text, on the event loop."""

    id: NodeId
    function: Callable[[State], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pure: bool = False


Node = Generation | Retrieval | Step


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """The question of a `RequestBuilder`: a generation's prompt without its documents. `ordered`: these may be put in
    the order of the engine's cache, else they stay in that of their rank."""

    text: str = field(repr=False)
    scope: Hashable = field(default=None, repr=False)
    max_tokens: int = 256
    temperature: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = True


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
