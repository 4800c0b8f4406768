"""Index of documents' copies by content (FusionRAG 4.1, alternative paths)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Contents", "CopyKind", "CopyLocation"]

# Minimum number of entries before dead ones are searched for.
_FEWEST = 1024
# Copies per document; all are read whenever a request waits.
_MOST_COPIES = 32


class CopyLocation(NamedTuple):
    """`tokens` tokens of KV computed at position `start`, directly after the node `parent`."""

    key: bytes
    parent: bytes | None
    start: int
    tokens: int


class CopyKind(IntEnum):
    """How a copy was computed; better kinds first."""

    PREPROCESSED = 0
    """Computed after similar documents (FusionRAG 3.1)."""
    STANDALONE = 1
    """Computed directly after the system prompt."""
    AFTER_DOCUMENTS = 2
    """Computed after other documents."""


_Copy = tuple[CopyKind, CopyLocation]


class Contents:
    """Index of nodes by a document's content (`Segment.content`). Not thread-safe.

    Entries are dropped once no tier has their node. Of the copies made after other documents only the latest are kept.
    """

    def __init__(self, held: Callable[[bytes], bool]) -> None:
        self._held = held
        self._copies: dict[bytes, dict[bytes, _Copy]] = {}
        self._entries = 0
        self._most = _FEWEST

    def __len__(self) -> int:
        return self._entries

    def add(self, content: bytes, copy: CopyLocation, kind: CopyKind) -> None:
        copies = self._copies.setdefault(content, {})
        self._entries += copies.pop(copy.key, None) is None
        copies[copy.key] = kind, copy
        if len(copies) > _MOST_COPIES:
            self._thin(content, copies)
        if self._entries > self._most:
            for each in list(self._copies):
                self._alive(each)
            self._most = max(_FEWEST, 2 * self._entries)

    def cover(self, documents: Sequence[bytes]) -> list[CopyLocation | None]:
        """Return the copy to use, or None, for each of consecutive documents.

        First choice is a preprocessed copy, then the copy that continues the last one, because such copies have
        attended to each other, then the copy that begins the longest run; ties go to a stand-alone copy.
        """
        alive = [self._alive(content) for content in documents]
        runs: list[dict[bytes, int]] = []
        following: dict[bytes, int] = {}
        for copies in reversed(alive):
            lengths = {copy.key: 1 + following.get(copy.key, 0) for _, copy in copies}
            runs.append(lengths)
            following = {}
            for _, copy in copies:
                if copy.parent is not None:
                    following[copy.parent] = max(following.get(copy.parent, 0), lengths[copy.key])
        chosen: list[CopyLocation | None] = []
        for copies, lengths in zip(alive, reversed(runs), strict=True):
            last = chosen[-1].key if chosen and chosen[-1] is not None else None
            chosen.append(_preferred(copies, lengths, last))
        return chosen

    def best(self, content: bytes) -> CopyKind | None:
        return min((kind for kind, _ in self._alive(content)), default=None)

    def clear(self) -> None:
        self._copies.clear()
        self._entries = 0

    def _thin(self, content: bytes, copies: dict[bytes, _Copy]) -> None:
        self._alive(content)
        others = [key for key, (kind, _) in copies.items() if kind is CopyKind.AFTER_DOCUMENTS]
        for key in others[: len(copies) - _MOST_COPIES]:
            del copies[key]
            self._entries -= 1

    def _alive(self, content: bytes) -> list[_Copy]:
        copies = self._copies.get(content)
        if copies is None:
            return []
        for key in [key for key in copies if not self._held(key)]:
            del copies[key]
            self._entries -= 1
        if not copies:
            del self._copies[content]
        return list(copies.values())


def _preferred(copies: Iterable[_Copy], lengths: dict[bytes, int], last: bytes | None) -> CopyLocation | None:
    def preference(entry: _Copy) -> tuple[bool, bool, int, CopyKind, bytes]:
        kind, copy = entry
        continues = last is not None and copy.parent == last
        return kind is not CopyKind.PREPROCESSED, not continues, -lengths[copy.key], kind, copy.key

    return min(copies, key=preference, default=(None, None))[1]
