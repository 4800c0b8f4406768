"""Warnings about requests without documents, and about ids that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from ragorder.adapters.proxy.digest import digest_of
from ragorder.adapters.proxy.marks import Left
from ragorder.lru_cache import LRUCache

__all__ = ["PassReason", "RenamedIds", "UnorderedRequests"]

PassReason = (
    Literal["no_documents", "one_document", "other_route", "too_many_values", "compressed", "unreadable"] | Left
)

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
_CLIENT_MARKS = (
    "documents keep their order in requests whose client sets marks of its own (cache_control): the server's cache is "
    "taken to resume only there; leave the marks to --marks, or give --no-marks if the cache finds any common prefix, "
    "as that of vLLM does"
)
_RENAMED = (
    "document ids are not stable: the same text comes under new ids, and nothing after a new id is cached; give "
    "stable ids, or show none"
)
_OR_BY_PLACE = (
    "; these are numbers of places, so --number-by-place helps as well, if the client reads x-ragorder-permutation in "
    "answers to tell which document a number means"
)
_NO_PLACES = (
    "; these are not 1, 2, … by place (are they numbers of sources?), so --number-by-place would leave them as they are"
)
_KEPT = (
    "--number-by-place has left ids as they are where they are not 1, 2, … by place: names, or numbers of sources, "
    "which several documents share; where such an id changes from request to request, the cache has nothing after it: "
    "give each source an id that stays, such as its path, or show none"
)


class UnorderedRequests:
    """Counts requests forwarded without documents, or with these as they came. Warns if the first 20 had none, and of
    the first one with marks of its client's."""

    def __init__(self, on_passed: Callable[[str], None] | None, warn: Callable[[str], None], *, template: bool) -> None:
        self._on_passed = on_passed
        self._warn = warn
        self._template = template
        self._without: int | None = 0
        self._told_of_marks = False

    def found(self) -> None:
        self._without = None

    def passed(self, reason: PassReason) -> None:
        # A counter that fails must not fail the request.
        with suppress(Exception):
            if self._on_passed is not None:
                self._on_passed(reason)
        if reason in ("client_marks", "no_marks"):
            self.found()
            if reason == "client_marks" and not self._told_of_marks:
                self._told_of_marks = True
                self._warn(_CLIENT_MARKS)
            return
        # Another thread may find documents meanwhile.
        without = self._without
        if without is None or reason in ("other_route", "compressed"):
            return
        self._without = without = without + 1
        if without == _ENOUGH:
            self._without = None
            self._warn(_NEVER_FOUND if self._template else _NEVER_TAGGED)


class RenamedIds:
    """Warns once if most recurring texts come under new ids, such as ranks, which the cache cannot have; with
    `by_place`, which renumbers ranks, if there are ids that are none. Keeps 16,384 digests, about 5 MB."""

    def __init__(self, warn: Callable[[str], None], *, by_place: bool = False) -> None:
        self._warn = warn
        self._by_place = by_place
        self._known: LRUCache[bytes] = LRUCache(_REMEMBERED)
        self._again = 0
        self._renamed = 0
        self._are_places = True
        self._watching = True

    def look(self, salt: str | None, documents: Iterable[tuple[str, str]], *, are_places: bool) -> None:
        """The ids and texts of a request's documents; `are_places`: the ids are numbers of places."""
        if not self._watching:
            return
        if self._by_place:
            if not are_places:
                self._end(_KEPT)
            return
        # A text that occurs twice in a request says nothing about the next one.
        for text, id in {text: id for id, text in documents}.items():
            key, name = digest_of(salt or "", text), digest_of(id)
            known = self._known.get(key)
            self._known.put(key, name)
            if known is not None:
                self._again += 1
                self._renamed += known != name
        self._are_places = self._are_places and are_places
        if self._renamed >= _ENOUGH and 2 * self._renamed > self._again:
            self._end(_RENAMED + (_OR_BY_PLACE if self._are_places else _NO_PLACES))

    def _end(self, said: str) -> None:
        self._watching = False
        self._warn(said)
