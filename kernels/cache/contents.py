"""Copies of documents by content, wherever they were computed (FusionRAG 4.1, alternative paths)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Contents", "Rank", "Whereabouts"]

# As many entries are kept before dead ones are looked for the first time.
_FEWEST = 1024
# Of one document: each is looked at whenever a request waits for its turn.
_MOST_COPIES = 32


class Whereabouts(NamedTuple):
    """A node: `tokens` tokens of KV, computed at position `start`, directly behind the node `parent`."""

    key: bytes
    parent: bytes | None
    start: int
    tokens: int


class Rank(IntEnum):
    """How a copy was made, the preferred way first."""

    PREPROCESSED = 0
    """In the sight of similar documents (FusionRAG 3.1)."""
    STANDALONE = 1
    """Behind the system prompt alone."""
    ELSEWHERE = 2
    """Behind other documents."""


_Copy = tuple[Rank, Whereabouts]


class Contents:
    """Index of nodes by a document's content (`Segment.content`). It keeps no node: an entry is forgotten once no tier
    holds its node. Of a document that stands behind many others the latest copies are known. Not thread-safe."""

    def __init__(self, held: Callable[[bytes], bool]) -> None:
        self._held = held
        self._copies: dict[bytes, dict[bytes, _Copy]] = {}
        self._entries = 0
        self._most = _FEWEST

    def __len__(self) -> int:
        return self._entries

    def add(self, content: bytes, copy: Whereabouts, rank: Rank) -> None:
        copies = self._copies.setdefault(content, {})
        self._entries += copies.pop(copy.key, None) is None
        copies[copy.key] = rank, copy
        if len(copies) > _MOST_COPIES:
            self._thin(content, copies)
        if self._entries > self._most:
            for each in list(self._copies):
                self._alive(each)
            self._most = max(_FEWEST, 2 * self._entries)

    def cover(self, documents: Sequence[bytes]) -> list[Whereabouts | None]:
        """For each of consecutive documents the copy to use, or None.

        A preprocessed copy, or the next one of a run: copies computed one behind the other have seen each other. Else
        the copy that begins the longest run, among equals a stand-alone one.
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
        chosen: list[Whereabouts | None] = []
        for copies, lengths in zip(alive, reversed(runs), strict=True):
            last = chosen[-1].key if chosen and chosen[-1] is not None else None
            chosen.append(_preferred(copies, lengths, last))
        return chosen

    def best(self, content: bytes) -> Rank | None:
        """None: there is no copy."""
        return min((rank for rank, _ in self._alive(content)), default=None)

    def clear(self) -> None:
        self._copies.clear()
        self._entries = 0

    def _thin(self, content: bytes, copies: dict[bytes, _Copy]) -> None:
        self._alive(content)
        others = [key for key, (rank, _) in copies.items() if rank is Rank.ELSEWHERE]
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


def _preferred(copies: Iterable[_Copy], lengths: dict[bytes, int], last: bytes | None) -> Whereabouts | None:
    def preference(entry: _Copy) -> tuple[bool, bool, int, Rank, bytes]:
        rank, copy = entry
        continues = last is not None and copy.parent == last
        return rank is not Rank.PREPROCESSED, not continues, -lengths[copy.key], rank, copy.key

    return min(copies, key=preference, default=(None, None))[1]
