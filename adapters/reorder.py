"""What the framework adapters share: they put documents in order, whatever these are, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import index
from typing import Any, Generic, Self, TypeVar

from ragorder.adapters.documents import name_of, order_items
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.orderer_like import OrdererLike
from ragorder.ordering import Ordering

__all__ = ["Key", "Reorder", "ScopeOf", "Tokens"]

T = TypeVar("T")

Key = Callable[[Any], Any]
Tokens = Callable[[Any], int]
ScopeOf = str | Callable[..., Hashable] | None


class Reorder(Generic[T]):
    """Puts the documents of requests in order. Thread-safe.

    `text`, `own_id` and `metadata` read a document, `key` and `tokens` are the user's. `scope` is one, or a function of
    the request that gives one. Raises nothing: what fails leaves the documents in retrieval order.

    A copy is the same object, for what the orderer knows of the engine is to be shared. A pickled one takes nothing
    along but the orderer's settings, and makes an `Orderer` of its own from them.
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
        """The items in their new order, and the ordering, which the caller finishes; in the scope of this request."""
        try:
            scope = self._scope(*request, **named) if callable(self._scope) else self._scope
        except Exception as error:
            return list(items), self.orderer.fall_back([Document("")] * len(items), error)
        return self.within(scope, items)

    def within(self, scope: Hashable, items: Sequence[T]) -> tuple[list[T], Ordering[Document]]:
        """The same in a scope."""
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
