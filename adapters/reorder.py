"""Ordering of a framework's own document objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import index
from typing import Any, Generic, Self, TypeVar

from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.protocols import OrdererLike

T = TypeVar("T")

Key = Callable[[Any], Any]
Tokens = Callable[[Any], int]
ScopeOf = str | Callable[..., Hashable] | None


@dataclass(eq=False, repr=False)
class Reorder(Generic[T]):
    """Ordering of requests' documents. Never raises: errors leave retrieval order. Thread-safe.

    `text`, `own_id`, `metadata` are the framework's; `key`, `tokens`, `scope` the user's. Copies share the orderer; a
    pickle loads with a new one.
    """

    orderer: OrdererLike
    _: KW_ONLY
    text: Callable[[T], str]
    own_id: Callable[[T], Any] | None = None
    metadata: Callable[[T], Mapping[str, Any]] | None = None
    key: Key | None = None
    tokens: Tokens | None = None
    scope: ScopeOf = None

    def __call__(self, items: Sequence[T], *request: Any, **named: Any) -> tuple[list[T], Ordering[Document]]:
        """Order the items in the scope, which a scope function reads from the request."""
        try:
            scope = self.scope(*request, **named) if callable(self.scope) else self.scope
        except Exception as error:
            # An unknown tenant must not be confused with another one, nor with no tenant.
            return self._as_ranked(items, error)
        return self.within(scope, items)

    def within(self, scope: Hashable, items: Sequence[T]) -> tuple[list[T], Ordering[Document]]:
        try:
            documents = [self._read(item) for item in items]
        except Exception as error:
            return self._as_ranked(items, error)
        ordering = self.orderer.order(documents, scope=scope)
        return [items[rank] for rank in ordering.permutation], ordering

    def _as_ranked(self, items: Sequence[T], error: Exception) -> tuple[list[T], Ordering[Document]]:
        return list(items), self.orderer.fall_back([Document("")] * len(items), error)

    def _read(self, item: T) -> Document:
        name = None if self.key is None else self.key(item)
        if name is None and self.own_id is not None:
            name = self.own_id(item)
        tokens = None if self.tokens is None else index(self.tokens(item))
        metadata = {} if self.metadata is None else self.metadata(item)
        return Document("" if name is None else str(name), self.text(item), tokens, metadata=metadata)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"orderer": self.orderer.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"orderer": Orderer(state["orderer"])}
