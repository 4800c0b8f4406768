"""Nodes, edges, state and errors of a workflow (HedraRAG 4.1)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from string import Formatter
from typing import Any

from ragorder.errors import RagorderError


class WorkflowError(RagorderError):
    pass


class GraphError(WorkflowError, ValueError):
    """A graph that cannot run, or an edge that returned no node."""


class RoundsError(GraphError):
    """A node that would run more than `max_rounds` times."""


class DeadlineError(WorkflowError, TimeoutError):
    """A deadline that ended before the answer."""


class UnknownNameError(WorkflowError, KeyError):
    __str__ = Exception.__str__


class UnknownValueError(WorkflowError): ...


class UnusableValueError(WorkflowError, TypeError): ...


class RefusedSearchError(WorkflowError, ValueError):
    """A search that the index cannot answer."""


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '\w{1,64}'", re.IGNORECASE)


class NodeError(WorkflowError, RuntimeError):
    """A failed node. The message has no text of the request; `__cause__` is the error."""

    def __init__(self, graph: str, node: object, failure: str) -> None:
        super().__init__(f"workflow {graph!r}, node {node!r}: {failure}")
        self.graph = graph
        self.node = node
        self.failure = failure

    def __reduce__(self) -> tuple[type[NodeError], tuple[str, object, str]]:
        return NodeError, (self.graph, self.node, self.failure)

    @classmethod
    def of(cls, graph: str, node: object, error: BaseException) -> NodeError:
        """Return the error to raise from `error`, whose own message is shown only if it is a `WorkflowError`."""
        if isinstance(error, WorkflowError):
            return cls(graph, node, str(error))
        # An engine that does not know an option of a generation; a name of Python's has no text.
        named = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
        return cls(graph, node, f"{type(error).__name__}: {named[0]}" if named else type(error).__name__)


QUESTION = ("input", "query")
"""Names of the user's question (HedraRAG's Listing 1)."""


UNKNOWN: Any = object()
"""In a state: a value not known yet."""


class State(Mapping[str, Any]):
    """Values by name, read-only. A node sees those of nodes before it, not of parallel ones."""

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
            value = self._values[name]
        except KeyError:
            raise UnknownNameError(f"the state has no {name!r}, only {', '.join(self._values)}") from None
        if value is UNKNOWN:
            raise UnknownValueError(f"{name!r} is not known yet")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        # Values are prompts and documents, which must not be logged.
        return f"State({', '.join(self._values)})"

    @property
    def age(self) -> int:
        return self._age

    def updated(self, values: Mapping[str, Any]) -> State:
        new = State()
        new._age = self._age + 1
        new._values = self._values | dict(values)
        new._written = self._written | dict.fromkeys(values, new._age)
        return new

    @classmethod
    def joined(cls, states: Iterable[State], age: int = 0) -> State:
        """Return the newest value of each name, of equally new ones the first; later ones are newer than `age`."""
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

    `documents`: the state's names of documents that come before the prompt, which has "the documents above" where it
    names them. `parse(text, state)` returns the value to store (default: the stripped text).
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
    """A search for `query`: a name of the state, a template, or a function. Stores the `topk` best."""

    id: NodeId
    query: str | Callable[[State], str]
    topk: int = 5
    output: str = "docs"

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.output,)


@dataclass(frozen=True, slots=True)
class Step:
    """A function that returns values for the names in `writes`, in a thread if it is no coroutine. `pure`: quick and
    without side effects, so it may be called speculatively, on the event loop."""

    id: NodeId
    function: Callable[[State], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pure: bool = False


Node = Generation | Retrieval | Step


def fields(template: str | Callable[[State], str]) -> frozenset[str]:
    if callable(template):
        return frozenset()
    names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    for name in sorted(names):
        if not name.isidentifier():
            raise ValueError(f"{{{name}}} is not a plain name: use a function of the state, or write a brace twice")
    return frozenset(names)


def query_fields(query: str | Callable[[State], str]) -> frozenset[str]:
    """Return the names that a query reads: its fields, or itself if it has no braces."""
    if callable(query) or "{" in query or "}" in query:
        return fields(query)
    if not query.isidentifier():
        raise ValueError(f"query={query!r} is neither a name of the state nor a template with {{names}}")
    return frozenset((query,))


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of a node in a request, from `round` 0."""

    node: Node = field(compare=False)
    id: NodeId
    round: int
    state: State = field(compare=False, repr=False)

    @property
    def key(self) -> tuple[NodeId, int]:
        return self.id, self.round


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """A generation's prompt without its documents, for a `RequestBuilder`.

    - `ordered`: documents may be ordered for the engine's cache, else by rank
    - `streamed`: tokens are read as they come, else the answer may come whole
    """

    text: str = field(repr=False)
    scope: Hashable = field(default=None, repr=False)
    max_tokens: int = 256
    temperature: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = True
    streamed: bool = field(default=True, compare=False)


Choice = Callable[[State], NodeId | Terminal]


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge to its one target, or to that of `targets` (empty: any) which `choose` returns."""

    source: NodeId | Terminal
    targets: tuple[NodeId | Terminal, ...]
    choose: Choice | None = None

    def target(self, state: State) -> NodeId | Terminal:
        return self.targets[0] if self.choose is None else self.choose(state)

    def resolved(self, everywhere: tuple[NodeId | Terminal, ...]) -> Edge:
        return self if self.targets else Edge(self.source, everywhere, self.choose)
