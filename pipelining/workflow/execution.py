"""Values that a node's run stores."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ragorder.pipelining.workflow.errors import UnusableValueError
from ragorder.pipelining.workflow.nodes import Generation, Retrieval, Step
from ragorder.pipelining.workflow.state import State

__all__ = ["answered", "call_step", "found"]


def answered(node: Generation, text: str, state: State) -> dict[str, Any]:
    """Raises what `parse` raises."""
    return {node.output: text.strip() if node.parse is None else node.parse(text, state)}


def found(node: Retrieval, documents: Iterable[Any]) -> dict[str, Any]:
    return {node.output: tuple(documents)}


async def call_step(node: Step, state: State) -> Mapping[str, Any]:
    """Raises what the function raises, UnusableValueError for a result other than values for `writes`."""
    for name in node.reads:
        state[name]
    if inspect.iscoroutinefunction(node.function):
        values: Any = await node.function(state)
    else:
        values = await asyncio.to_thread(node.function, state)
        if inspect.isawaitable(values):
            values = await values
    if not isinstance(values, Mapping):
        raise UnusableValueError(f"a step must return a mapping of names to values, got {type(values).__name__}")
    if unknown := [name for name in values if name not in node.writes]:
        raise UnusableValueError(f"the step returned {', '.join(map(repr, unknown))}: name them in `writes`")
    return values
