"""Index of documents' copies by content (FusionRAG 4.1, alternative paths)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, CopyLocation
from ragorder.kernels.cache.segments import Segment

# Entries before dead ones are searched for.
_FEWEST = 1024
# Copies per document; all are read when a request waits.
_MOST_COPIES = 32


class CopyKind(IntEnum):
    """How a copy was computed; better kinds first."""

    PREPROCESSED = 0
    """After similar documents (FusionRAG 3.1)."""
    STANDALONE = 1
    """Directly after the system prompt."""
    AFTER_DOCUMENTS = 2


_Copy = tuple[CopyKind, CopyLocation]


class Contents:
    """Copies by `Segment.content`, while a tier has them; of those after other documents only the latest. Not
    thread-safe."""

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
        """Return each document's copy to use, or None: a preprocessed one, else the one that continues the last copy,
        else the one that begins the longest run."""
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

    def has(self, content: bytes) -> bool:
        return bool(self._alive(content))

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


class DocumentIndex:
    def __init__(self, contents: Contents, tiers: Hierarchy) -> None:
        self._contents = contents
        self._tiers = tiers

    def add(self, segment: Segment, parent: bytes | None, start: int) -> None:
        if segment.content:
            kind = CopyKind.STANDALONE if segment.content == segment.key else CopyKind.AFTER_DOCUMENTS
            self._contents.add(segment.content, CopyLocation(segment.key, parent, start, segment.tokens), kind)

    def nodes(self, path: Sequence[Segment], cached: int) -> Iterator[tuple[int, CachedNode]]:
        """Yield positions and copies of documents after the first `cached` segments."""
        later = path[cached:]
        self._find_on_disk(path, later)
        start = sum(segment.tokens for segment in path[:cached])
        # No document has an empty content.
        copies = self._contents.cover([b"" if segment.exact else segment.content for segment in later])
        for segment, where in zip(later, copies, strict=True):
            node = self._tiers.find(where) if where is not None else None
            if node is not None and node.tokens == segment.tokens:
                yield start, node
            start += segment.tokens

    def known(self, path: Sequence[Segment]) -> list[bool]:
        self._find_on_disk(path, path)
        return [self._contents.has(segment.content) for segment in path]

    def _find_on_disk(self, path: Sequence[Segment], later: Sequence[Segment]) -> None:
        if (disk := self._tiers.disk) is None:
            return
        # Copies made directly after the prefix are found by content alone, even after a restart.
        front = path[0] if path and not path[0].content else None
        parent, begin = (front.key, front.tokens) if front is not None else (None, 0)
        for content, tokens in ((segment.content, segment.tokens) for segment in later if segment.content):
            if content in disk:
                self._contents.add(content, CopyLocation(content, parent, begin, tokens), CopyKind.STANDALONE)
            if (made := disk.variant(content)) is not None:
                self._contents.add(content, CopyLocation(made, parent, begin, tokens), CopyKind.PREPROCESSED)
