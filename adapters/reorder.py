"""Ordering of a framework's own document objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import index
from typing import Any, Generic, Self, TypeVar

from ragorder.document import Document
from ragorder.orderer import Orderer, OrdererLike
from ragorder.ordering import Ordering

__all__ = ["Key", "Reorder", "ScopeOf", "Tokens", "degrade", "name_of", "order_items"]

T = TypeVar("T")

Key = Callable[[Any], Any]
Tokens = Callable[[Any], int]
ScopeOf = str | Callable[..., Hashable] | None


def order_items(
    orderer: OrdererLike, items: Sequence[T], read: Callable[[T], Document], *, scope: Hashable = None
) -> tuple[list[T], Ordering[Document]]:
    """Return the items ordered by the documents that `read` returns, and the ordering. Never raises: unreadable items
    stay in retrieval order."""
    items = list(items)
    try:
        documents = [read(item) for item in items]
    except Exception as error:
        return items, orderer.fall_back([Document("")] * len(items), error)
    ordering = orderer.order(documents, scope=scope)
    return [items[rank] for rank in ordering.permutation], ordering


def name_of(item: T, own_id: Any, key: Callable[[T], Any] | None) -> str:
    name = key(item) if key is not None else None
    name = own_id if name is None else name
    return "" if name is None else str(name)


def degrade(orderer: OrdererLike, reason: str) -> None:
    note = getattr(orderer, "degrade", None)
    if note is not None:
        note(reason)


class Reorder(Generic[T]):
    """Ordering of requests' documents; errors leave retrieval order. Thread-safe.

    `text`, `own_id`, `metadata` read a document; `key`, `tokens`, `scope` are the user's. A copy is the same object, to
    share the orderer; a pickle loads with a new one.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        *,
        text: Callable[[T], str],
        own_id: Callable[[T], Any],
        metadata: Callable[[T], Mapping[str, Any]] | None = None,
        key: Key | None = None,
        tokens: Tokens | None = None,
        scope: ScopeOf = None,
    ) -> None:
        self.orderer = orderer
        self._text = text
        self._own_id = own_id
        self._metadata = metadata
        self.key = key
        self.tokens = tokens
        self._scope = scope

    def __call__(self, items: Sequence[T], *request: Any, **named: Any) -> tuple[list[T], Ordering[Document]]:
        try:
            scope = self._scope(*request, **named) if callable(self._scope) else self._scope
        except Exception as error:
            return list(items), self.orderer.fall_back([Document("")] * len(items), error)
        return self.within(scope, items)

    def within(self, scope: Hashable, items: Sequence[T]) -> tuple[list[T], Ordering[Document]]:
        return order_items(self.orderer, items, self._read, scope=scope)

    def _read(self, item: T) -> Document:
        name = name_of(item, self._own_id(item), self.key)
        tokens = None if self.tokens is None else index(self.tokens(item))
        return Document(name, self._text(item), tokens, metadata=self._metadata(item) if self._metadata else {})

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"orderer": self.orderer.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"orderer": Orderer(state["orderer"])}
