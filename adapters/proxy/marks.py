"""Marks (`cache_control`) in bodies whose client set none: where a cache can be resumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Raw

from ragorder.adapters.proxy.body import BOUNDARY
from ragorder.adapters.proxy.conversation import Chunk

__all__ = ["MARK", "chunks_of", "may_be_marked"]

MARK = Raw(b'{"type":"ephemeral"}')
_FIELD = b'"cache_control"'


def may_be_marked(content: bytes) -> bool:
    """Whether the client has set no mark in the body."""
    return _FIELD not in content


def chunks_of(pieces: Sequence[str], marked: Collection[int]) -> list[Chunk]:
    """A content part for each document, whatever is marked: a cache finds parts again only if they are divided alike.

    `pieces` alternate: head, document, gap, document, …, tail; `BOUNDARY` separates the parts that they are in. What
    stands in front of a document is part of its chunk.
    """
    chunks: list[Chunk] = []
    part = 0
    segments = [front + document for front, document in zip(pieces[:-1:2], pieces[1::2], strict=True)]
    for number, segment in enumerate([*segments, pieces[-1]], 1):
        for place, text in enumerate(segment.split(BOUNDARY)):
            part += place > 0
            last = chunks[-1] if chunks else None
            if last is not None and last.part == part and not text.strip():
                # No server takes a part of white space alone.
                chunks[-1] = last._replace(text=last.text + text)
            else:
                chunks.append(Chunk(part, text))
        if number in marked and number <= len(segments):
            chunks[-1] = chunks[-1]._replace(marked=True)
    return chunks
