"""Warnings about requests that gain nothing: no documents are found, or their ids change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Literal

from ragorder.lru_cache import LRUCache

__all__ = ["PassReason", "RenamedIds", "UnorderedRequests"]

PassReason = Literal["no_documents", "one_document", "other_route", "unreadable"]

# Requests, or texts, that are enough to judge by.
_ENOUGH = 20
_REMEMBERED = 16384

_NEVER_FOUND = (
    f"nothing is ordered: in {_ENOUGH} requests --template never found two documents in a row; compare it with "
)
_NEVER_FOUND += "a prompt as it is sent"
_NEVER_TAGGED = (
    f"nothing is ordered: none of {_ENOUGH} requests was tagged, and no --template says how documents stand in "
)
_NEVER_TAGGED += "a message"
_RENAMED = (
    "document ids are ranks, or change otherwise: the same text comes under new ids, and nothing behind an id that "
)
_RENAMED += "has changed is found in the cache; give ids that stay, show none, or use --number-by-place"


class UnorderedRequests:
    """Counts requests that were forwarded without documents: `on_passed` gets the reason of each. Warns once if the
    first 20 of those that were looked at had none."""

    def __init__(self, on_passed: Callable[[str], None] | None, warn: Callable[[str], None], *, template: bool) -> None:
        self._on_passed = on_passed
        self._warn = warn
        self._template = template
        self._without: int | None = 0

    def found(self) -> None:
        self._without = None

    def passed(self, reason: PassReason) -> None:
        # A counter that fails must not fail the request.
        with suppress(Exception):
            if self._on_passed is not None:
                self._on_passed(reason)
        if self._without is None or reason == "other_route":
            return
        self._without += 1
        if self._without == _ENOUGH:
            self._without = None
            self._warn(_NEVER_FOUND if self._template else _NEVER_TAGGED)


class RenamedIds:
    """Detects known texts under new ids, as ids are that are ranks: such an id stands in front of its text, which is
    then not found in the cache. Warns once if most texts that come again are renamed, and stops looking.

    Digests of 16,384 documents are kept, in about 5 MB.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._known: LRUCache[bytes] = LRUCache(_REMEMBERED)
        self._again = 0
        self._renamed = 0
        self._watching = True

    def look(self, salt: str | None, documents: Iterable[tuple[str, str]]) -> None:
        """`documents`: ids and texts of a request."""
        if not self._watching:
            return
        # A text that occurs twice in a request says nothing about the next one.
        for text, id in {text: id for id, text in documents}.items():
            key, name = _digest(salt or "", text), _digest(id)
            known = self._known.get(key)
            self._known.put(key, name)
            if known is not None:
                self._again += 1
                self._renamed += known != name
        if self._renamed >= _ENOUGH and 2 * self._renamed > self._again:
            self._watching = False
            self._warn(_RENAMED)


def _digest(*texts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(b"%d:" % len(text))
        digest.update(text.encode())
    return digest.digest()
