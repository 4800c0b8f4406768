"""State of one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ragorder.pipelining.workflow.errors import UnknownNameError

__all__ = ["QUESTION", "State"]

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
