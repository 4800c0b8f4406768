"""What keeps the proxy from being of use, noticed and said once: no documents are found, or their ids change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Literal

from ragorder.lru_cache import LRUCache

__all__ = ["Ids", "Passed", "Reason"]

Reason = Literal["no_documents", "one_document", "other_route", "unreadable"]

# So many requests, or texts, are enough to judge by.
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


class Passed:
    """Tells `on_passed` of each request that went on without documents, and why. `warn` is told once if the first 20 of
    those that were looked at had none."""

    def __init__(self, on_passed: Callable[[str], None] | None, warn: Callable[[str], None], *, template: bool) -> None:
        self._on_passed = on_passed
        self._warn = warn
        self._template = template
        self._without: int | None = 0

    def found(self) -> None:
        """A request had documents."""
        self._without = None

    def passed(self, reason: Reason) -> None:
        """A request went on as it came."""
        # Counting is never worth a request.
        with suppress(Exception):
            if self._on_passed is not None:
                self._on_passed(reason)
        if self._without is None or reason == "other_route":
            return
        self._without += 1
        if self._without == _ENOUGH:
            self._without = None
            self._warn(_NEVER_FOUND if self._template else _NEVER_TAGGED)


class Ids:
    """Notices documents whose text is known and whose id is another one than before, as ids are that are ranks. Such an
    id stands in front of its text, so that the engine finds nothing again. `warn` is told once if most of those that
    come again are such; then nothing is looked at any more.

    Digests of 16,384 documents are kept, in about 5 MB.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._known: LRUCache[bytes] = LRUCache(_REMEMBERED)
        self._again = 0
        self._renamed = 0
        self._watching = True

    def look(self, salt: str | None, documents: Iterable[tuple[str, str]]) -> None:
        """A request has documents with these ids and texts."""
        if not self._watching:
            return
        # A text that a request has twice says nothing of the next request.
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
