"""Nodes of a workflow (HedraRAG section 4.1)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ragorder.pipelining.workflow.state import State

__all__ = ["END", "START", "Generation", "Node", "NodeId", "NodeQuestion", "Retrieval", "Step", "Terminal"]

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
