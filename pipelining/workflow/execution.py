"""Inputs and outputs of a workflow's nodes, and one request's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ragorder.pipelining.servers import call
from ragorder.pipelining.workflow.nodes import Generation, NodeQuestion, Retrieval, State, Step, UnusableValueError


def answered(node: Generation, text: str, state: State) -> dict[str, Any]:
    return {node.output: text.strip() if node.parse is None else node.parse(text, state)}


def found(node: Retrieval, documents: Iterable[Any]) -> dict[str, Any]:
    return {node.output: tuple(documents)}


async def call_step(node: Step, state: State) -> Mapping[str, Any]:
    for name in node.reads:
        state[name]
    values = await call(node.function, state)
    if not isinstance(values, Mapping):
        raise UnusableValueError(f"a step must return a mapping of names to values, got {type(values).__name__}")
    if unknown := [name for name in values if name not in node.writes]:
        raise UnusableValueError(f"the step returned {', '.join(map(repr, unknown))}: name them in `writes`")
    return values


_DOCUMENTS_ABOVE = "the documents above"


def question_of(node: Generation, state: State, scope: Any = None) -> NodeQuestion:
    shown = state.updated(dict.fromkeys(node.documents, _DOCUMENTS_ABOVE))
    options = dict(node.options)
    temperature = options.pop("temperature", 0.0)
    return NodeQuestion(_text(node.prompt, shown), scope, node.max_tokens, temperature, options)


def documents_of(node: Generation, state: State) -> tuple[Any, ...]:
    found = [document for name in node.documents for document in _documents(state[name])]
    if len(node.documents) < 2:
        return tuple(found)
    once: list[Any] = []
    for document in found:
        if not any(_same(document, other) for other in once):
            once.append(document)
    return tuple(once)


def _same(one: Any, other: Any) -> bool:
    """By their keys, else as wholes: whether two searches return the same object depends on what is kept of one."""
    key, seen = getattr(one, "key", one), getattr(other, "key", other)
    try:
        # An array compares to an array.
        return key is seen or (key == seen) is True
    except Exception:
        # What contains arrays, such as a hit with its embedding, cannot be compared.
        return False


def query_of(node: Retrieval, state: State) -> str:
    if isinstance(node.query, str) and "{" not in node.query:
        return _checked(state[node.query])
    return _text(node.query, state)


def _documents(value: Any) -> Iterable[Any]:
    # They are read more than once, and an iterator only once.
    if isinstance(value, str | Iterator) or not isinstance(value, Iterable):
        raise UnusableValueError(f"documents must be a sequence of them, got {type(value).__name__}")
    return value


def _text(template: str | Callable[[State], str], state: State) -> str:
    return _checked(template(state)) if callable(template) else template.format_map(state)


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise UnusableValueError(f"a prompt or query must be a string, got {type(text).__name__}")
    return text


Input = tuple[NodeQuestion, tuple[Any, ...]] | tuple[str, int]
"""A generation's question and documents, or a search's query and topk."""


def input_of(node: Generation | Retrieval, state: State, scope: Hashable) -> Input:
    """Raises errors of the graph's functions."""
    if isinstance(node, Generation):
        return question_of(node, state, scope), documents_of(node, state)
    return query_of(node, state), node.topk


class Memory:
    """One request's answers and found documents, running ones included, by input (compared with ==). `memo`: see
    `WorkflowServer`."""

    def __init__(self, memo: bool | None = None) -> None:
        self._memo = memo
        self._known: dict[str, list[tuple[Input, asyncio.Future[Any]]]] = {}

    def find(self, asked: Input) -> asyncio.Future[Any] | None:
        if not self._keeps(asked):
            return None
        return next((known for other, known in self._known.get(_text_of(asked), ()) if _equal(asked, other)), None)

    @contextmanager
    def asking(self, asked: Input) -> Iterator[asyncio.Future[Any]]:
        """Yield the future for the result; an entry without a result is removed."""
        entry = asked, asyncio.get_running_loop().create_future()
        self._known.setdefault(_text_of(asked), []).append(entry)
        try:
            yield entry[1]
        finally:
            if not entry[1].done():
                entry[1].cancel()
            if entry[1].cancelled():
                self._known[_text_of(asked)] = [other for other in self._known[_text_of(asked)] if other is not entry]

    def _keeps(self, asked: Input) -> bool:
        question, _ = asked
        if self._memo is None:
            return not isinstance(question, NodeQuestion) or question.temperature == 0
        return self._memo


def _text_of(asked: Input) -> str:
    question, _ = asked
    return question.text if isinstance(question, NodeQuestion) else question


def _equal(one: Input, other: Input) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # Documents such as arrays, which == compares element by element.
        return False
