"""Documents as a JSON list in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

from ragorder.adapters.proxy.bodies.template import DocumentTemplate

__all__ = ["JSONTemplate"]

_JSON = json.JSONDecoder()
_JSON_LIST = re.compile(r"\[\s{0,64}\{")
_JSON_NEXT = re.compile(r"\s{0,64}(?:,\s{0,64}(?=\{)|\])")
# Lists in a text that are read, and the longest text.
_MOST_LISTS = 64
_LONGEST_JSON = 1 << 20


class JSONTemplate(DocumentTemplate):
    """Form of documents as a JSON list in a text: two or more objects with the same names, each with a text."""

    def __init__(self) -> None:
        super().__init__("[{text}\n{text}]", name="json")

    def _check(self) -> None:
        """Do nothing: JSON needs no marks."""

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        if len(text) > _LONGEST_JSON:
            return
        for found in islice(_JSON_LIST.finditer(text), _MOST_LISTS):
            items = list(_json_items(text, found.end() - 1))
            if len(items) > 1:
                yield from items
                return

    def _are_adjacent(self, text: str, start: int, end: int) -> bool:
        return True


def _json_items(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the objects of a list, the first one at `at`; nothing if one is no document, or the list does not end."""
    items: list[tuple[int, int]] = []
    names: set[str] | None = None
    while True:
        try:
            item, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if not isinstance(item, dict) or not any(isinstance(value, str) for value in item.values()):
            return
        if names is not None and item.keys() != names:
            return
        names = set(item)
        items.append((at, end))
        following = _JSON_NEXT.match(text, end)
        if following is None:
            return
        if following[0].endswith("]"):
            yield from items
            return
        at = following.end()
