"""One order, as it stands in the log."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from ragorder.adapters.structs import readable_by_threads

__all__ = ["SharedOrder", "UnreadableError", "is_shareable", "read_order"]

_MOST_DOCUMENTS = 4096


class UnreadableError(ValueError):
    """Not an order of this version."""


@readable_by_threads
class SharedOrder(msgspec.Struct, frozen=True, array_like=True):
    """Keys and lengths of a request's documents by rank, and the rank at each place of the prompt. `process` is the
    writer. Keys and scopes are texts, bytes or whole numbers, a scope also None."""

    process: bytes
    scope: Any
    keys: list[Any]
    tokens: list[int]
    permutation: list[int]
    estimated: bool = False
    suffix_tokens: int | None = None
    prefix_tokens: int | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def read_order(content: bytes) -> SharedOrder:
    """Raises UnreadableError."""
    try:
        order = msgspec.msgpack.decode(content, type=SharedOrder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UnreadableError("not an order") from None
    count = len(order.keys)
    numbers = [*order.tokens, order.suffix_tokens or 0, order.prefix_tokens or 0]
    fits = count == len(order.tokens) <= _MOST_DOCUMENTS and sorted(order.permutation) == list(range(count))
    if not fits or min(numbers) < 0 or not all(map(is_shareable, order.keys)):
        raise UnreadableError("not an order of these documents")
    if order.scope is not None and not is_shareable(order.scope):
        raise UnreadableError("not a scope")
    return order


def is_shareable(key: Hashable) -> bool:
    """Whether a key or a scope is the same in all processes."""
    return type(key) in (str, bytes, int)
