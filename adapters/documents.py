"""Documents of other frameworks: read for the orderer, and given back as they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from ragorder.document import Document
from ragorder.orderer_like import OrdererLike
from ragorder.ordering import Ordering

__all__ = ["Read", "degrade", "name_of", "order_items"]

T = TypeVar("T")

Read = Callable[[T], Document]


def order_items(
    orderer: OrdererLike, items: Sequence[T], read: Read[T], *, scope: Hashable = None, **options: Any
) -> tuple[list[T], Ordering[Document]]:
    """The items themselves, each as often as it was given, in the order of what `read` makes of them, and that order.

    Raises nothing: items that cannot be read stay in retrieval order.
    """
    items = list(items)
    try:
        documents = [read(item) for item in items]
    except Exception as error:
        return items, orderer.fall_back([Document("")] * len(items), error)
    ordering = orderer.order(documents, scope=scope, **options)
    return [items[rank] for rank in ordering.permutation], ordering


def name_of(item: T, own: Any, key: Callable[[T], Any] | None) -> str:
    """What an item is known by besides its text: what the user's `key` gives, else its `own` id, else nothing."""
    name = key(item) if key is not None else None
    name = own if name is None else name
    return "" if name is None else str(name)


def degrade(orderer: OrdererLike, reason: str) -> None:
    """Tell an orderer what keeps it from its best. A wrapper of a user's own need not take note of it."""
    note = getattr(orderer, "degrade", None)
    if note is not None:
        note(reason)
