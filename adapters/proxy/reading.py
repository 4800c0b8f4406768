"""JSON from outside, read no further than it is allowed to go."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

__all__ = ["TooManyError", "decode", "decode_items"]

T = TypeVar("T")


class TooManyError(ValueError):
    """A list has more items than are read."""


def decode(content: bytes | Raw, kind: type[T]) -> T | None:
    """What JSON says; None if it says something else, or is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_items(content: bytes | Raw, limit: int) -> list[Raw] | None:
    """The items of a list, as they stand; None if it is no list, or no JSON. Nothing of a longer list is built.

    Raises TooManyError for more items than `limit`.
    """
    if bytes(content).count(b",") >= limit and not _fits(content, limit):
        raise TooManyError(f"a list has more than {limit:,} items")
    return decode(content, list[Raw])


def _fits(content: bytes | Raw, limit: int) -> bool:
    try:
        _short_list(limit).decode(content)
    except msgspec.ValidationError as error:
        # The other kind of error: what is no list has no items.
        return "length" not in str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return True


@cache
def _short_list(limit: int) -> msgspec.json.Decoder[Any]:
    """A decoder that stops at the first item too many. A limit on the length of a list would be looked at when all of
    it has been built; that of a structure which is written as a list is looked at on the way."""
    items = [(f"_{number}", Raw, Raw(b"")) for number in range(limit)]
    return msgspec.json.Decoder(msgspec.defstruct("Items", items, array_like=True, forbid_unknown_fields=True))
