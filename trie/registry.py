"""Registry of policy classes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

P = TypeVar("P")
C = TypeVar("C")


class Registry(Generic[P]):
    """Policies of one kind, registered by their modules.

        @tails.register("prefix", "only the cached prefix moves")
        class RankTail(Tail): ...

    A new policy is one new class.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._classes: dict[str, type[P]] = {}
        self._help: dict[str, str] = {}

    def register(self, name: str, help: str) -> Callable[[type[C]], type[C]]:
        def add(policy: type[C]) -> type[C]:
            self._classes[name] = policy  # type: ignore[assignment]
            self._help[name] = help
            return policy

        return add

    def __getitem__(self, name: str) -> type[P]:
        return self._classes[name]

    @property
    def names(self) -> list[str]:
        return sorted(self._classes)

    @property
    def help(self) -> str:
        return self.help_of(self.names)

    def help_of(self, names: Iterable[str]) -> str:
        return "; ".join(f"{name}: {self._help[name]}" for name in names)

    def check(self, name: str) -> str:
        if name in self._classes:
            return name
        from difflib import get_close_matches

        near = get_close_matches(name, self._classes, n=1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{self._kind} must be one of {', '.join(map(repr, self.names))}, got {name!r}{meant}")
