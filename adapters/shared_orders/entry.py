"""An order in the log."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from ragorder.adapters.structs import readable_by_threads
from ragorder.errors import RagorderError

__all__ = ["SharedOrder", "UnreadableError", "is_shareable", "read_order"]

# Limits on the data that a writer of the log can make a reader keep.
_MOST_DOCUMENTS = 4096
_MOST_TOKENS = 10_000_000
_LONGEST_NAME = 1024
_MOST_BYTES = 1 << 20


class UnreadableError(RagorderError, ValueError):
    """Not an order of this version."""


@readable_by_threads
class SharedOrder(msgspec.Struct, frozen=True, array_like=True):
    """Keys and lengths of a request's documents by rank, and the rank at each position of the prompt. `process` is the
    writer. Keys and scopes are texts or bytes of at most 1,024, or integers; a scope may be None."""

    process: bytes
    scope: Any
    keys: list[Any]
    tokens: list[int]
    permutation: list[int]
    estimated: bool = False
    suffix_tokens: int | None = None
    prefix_tokens: int | None = None

    def encode(self) -> bytes:
        """Raises UnreadableError for an order that no reader accepts, OverflowError for integers above 64 bits,
        UnicodeEncodeError for a text that UTF-8 cannot encode."""
        _check(self)
        return _bounded(msgspec.msgpack.encode(self))


def read_order(content: bytes) -> SharedOrder:
    """Raises UnreadableError."""
    try:
        order = msgspec.msgpack.decode(_bounded(content), type=SharedOrder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UnreadableError("not an order") from None
    _check(order)
    return order


def is_shareable(key: Hashable) -> bool:
    if isinstance(key, str | bytes):
        return type(key) in (str, bytes) and len(key) <= _LONGEST_NAME
    return type(key) is int


def _bounded(content: bytes) -> bytes:
    if len(content) > _MOST_BYTES:
        raise UnreadableError(f"an order has at most {_MOST_BYTES:,} bytes")
    return content


def _check(order: SharedOrder) -> None:
    count = len(order.keys)
    numbers = [*order.tokens, order.suffix_tokens or 0, order.prefix_tokens or 0]
    fits = count == len(order.tokens) <= _MOST_DOCUMENTS and sorted(order.permutation) == list(range(count))
    if not fits or min(numbers) < 0 or sum(numbers) > _MOST_TOKENS or not all(map(is_shareable, order.keys)):
        raise UnreadableError("not an order of these documents")
    if not is_shareable(order.process) or not (order.scope is None or is_shareable(order.scope)):
        raise UnreadableError("not a writer and a scope")
