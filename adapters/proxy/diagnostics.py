"""Warnings about requests without documents, and about ids that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from ragorder.adapters.proxy.digest import digest_of
from ragorder.lru_cache import LRUCache

__all__ = ["PassReason", "RenamedIds", "UnorderedRequests"]

PassReason = Literal["no_documents", "one_document", "other_route", "unreadable"]

# Requests, or texts, that are enough to judge by.
_ENOUGH = 20
_REMEMBERED = 16384

_NEVER_FOUND = (
    f"no documents were ordered: --template did not match two adjacent documents in any of {_ENOUGH} requests; "
    "compare it with a prompt that the proxy receives"
)
_NEVER_TAGGED = (
    f"no documents were ordered: none of {_ENOUGH} requests was tagged, and there is no --template to find documents "
    "in messages"
)
_RENAMED = (
    "document ids are not stable (are they ranks?): the same text comes under new ids, and the cache has nothing "
    "behind a new id; give stable ids, show none, or use --number-by-place"
)


class UnorderedRequests:
    """Counts requests forwarded without documents. Warns if the first 20 had none."""

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
        # Another thread may find documents meanwhile.
        without = self._without
        if without is None or reason == "other_route":
            return
        self._without = without = without + 1
        if without == _ENOUGH:
            self._without = None
            self._warn(_NEVER_FOUND if self._template else _NEVER_TAGGED)


class RenamedIds:
    """Warns once if most recurring texts come under new ids, such as ranks, which the cache cannot have. Keeps 16,384
    digests, about 5 MB."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._known: LRUCache[bytes] = LRUCache(_REMEMBERED)
        self._again = 0
        self._renamed = 0
        self._watching = True

    def look(self, salt: str | None, documents: Iterable[tuple[str, str]]) -> None:
        if not self._watching:
            return
        # A text that occurs twice in a request says nothing about the next one.
        for text, id in {text: id for id, text in documents}.items():
            key, name = digest_of(salt or "", text), digest_of(id)
            known = self._known.get(key)
            self._known.put(key, name)
            if known is not None:
                self._again += 1
                self._renamed += known != name
        if self._renamed >= _ENOUGH and 2 * self._renamed > self._again:
            self._watching = False
            self._warn(_RENAMED)
