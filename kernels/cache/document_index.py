"""Copies of documents outside a cached prefix, over all tiers (FusionRAG 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ragorder.kernels.cache.contents import Contents, CopyKind, CopyLocation
from ragorder.kernels.cache.disk import StoreTier
from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode
from ragorder.kernels.cache.segments import Segment

__all__ = ["DocumentIndex"]


class DocumentIndex:
    """Finds documents' copies by `contents`, which it keeps up to date."""

    def __init__(self, contents: Contents, tiers: Hierarchy, disk: StoreTier | None) -> None:
        self._contents = contents
        self._tiers = tiers
        self._disk = disk

    def add(self, segment: Segment, parent: bytes | None, start: int) -> None:
        if segment.content:
            kind = CopyKind.STANDALONE if segment.content == segment.key else CopyKind.AFTER_DOCUMENTS
            self._contents.add(segment.content, CopyLocation(segment.key, parent, start, segment.tokens), kind)

    def nodes(self, path: Sequence[Segment], cached: int) -> Iterator[tuple[int, CachedNode]]:
        """Yield positions in the prompt and copies of documents after the first `cached` segments."""
        later = path[cached:]
        if self._disk is not None:
            self._find_on_disk(self._disk, path, later)
        start = sum(segment.tokens for segment in path[:cached])
        # No document has an empty content.
        copies = self._contents.cover([b"" if segment.exact else segment.content for segment in later])
        for segment, where in zip(later, copies, strict=True):
            node = self._tiers.find(where) if where is not None else None
            if node is not None and node.tokens == segment.tokens:
                yield start, node
            start += segment.tokens

    def kinds(self, path: Sequence[Segment]) -> list[CopyKind | None]:
        if self._disk is not None:
            self._find_on_disk(self._disk, path, path)
        return [self._contents.best(segment.content) for segment in path]

    def _find_on_disk(self, disk: StoreTier, path: Sequence[Segment], later: Sequence[Segment]) -> None:
        # Copies made directly after the prefix are found by their content alone, even after a restart.
        front = path[0] if path and not path[0].content else None
        parent, begin = (front.key, front.tokens) if front is not None else (None, 0)
        for content, tokens in ((segment.content, segment.tokens) for segment in later if segment.content):
            if content in disk:
                self._contents.add(content, CopyLocation(content, parent, begin, tokens), CopyKind.STANDALONE)
            if (made := disk.variant(content)) is not None:
                self._contents.add(content, CopyLocation(made, parent, begin, tokens), CopyKind.PREPROCESSED)
