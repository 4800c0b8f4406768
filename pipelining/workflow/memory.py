"""What one request has asked and found."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ragorder.pipelining.workflow.execution import documents_of, query_of, question_of
from ragorder.pipelining.workflow.nodes import Generation, NodeQuestion, Retrieval, State

__all__ = ["Input", "Memory", "input_of"]

Input = tuple[NodeQuestion, tuple[Any, ...]] | tuple[str, int]
"""Question and documents of a generation, or query and topk of a search."""


def input_of(node: Generation | Retrieval, state: State, scope: Hashable) -> Input:
    """Raises the errors of the graph's functions."""
    if isinstance(node, Generation):
        return question_of(node, state, scope), documents_of(node, state)
    return query_of(node, state), node.topk


class Memory:
    """Answers and found documents of one request, by their inputs.

        if (known := memory.find(asked)) is not None:
            return await known
        with memory.asking(asked) as known:
            known.set_result(…)

    What is still being answered is known, too. Inputs are compared by ==. `memo`: None for searches and for generations
    at temperature 0, True for all, False for none.
    """

    def __init__(self, memo: bool | None = None) -> None:
        self._memo = memo
        self._known: dict[str, list[tuple[Input, asyncio.Future[Any]]]] = {}

    def find(self, asked: Input) -> asyncio.Future[Any] | None:
        if not self._keeps(asked):
            return None
        return next((known for other, known in self._known.get(_text(asked), ()) if _equal(asked, other)), None)

    @contextmanager
    def asking(self, asked: Input) -> Iterator[asyncio.Future[Any]]:
        """Yield the future that the caller gives the result. It is forgotten if there is none."""
        entry = asked, asyncio.get_running_loop().create_future()
        self._known.setdefault(_text(asked), []).append(entry)
        try:
            yield entry[1]
        finally:
            if not entry[1].done():
                entry[1].cancel()
            if entry[1].cancelled():
                self._known[_text(asked)] = [other for other in self._known[_text(asked)] if other is not entry]

    def _keeps(self, asked: Input) -> bool:
        question, _ = asked
        if self._memo is None:
            return not isinstance(question, NodeQuestion) or question.temperature == 0
        return self._memo


def _text(asked: Input) -> str:
    question, _ = asked
    return question.text if isinstance(question, NodeQuestion) else question


def _equal(one: Input, other: Input) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # Documents such as arrays, which == compares element by element.
        return False
