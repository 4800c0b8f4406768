"""Prompts as paths in the knowledge tree."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Segment", "segments_of"]

_KEY_BYTES = 32


class Segment(NamedTuple):
    """A node: `tokens` tokens; `key` stands for them, all before them, and the tenant."""

    key: bytes
    tokens: int


def segments_of(
    token_ids: Sequence[int], ends: Sequence[int], *, salt: str | None = None, chunk_tokens: int = 256
) -> tuple[Segment, ...]:
    """The nodes of a prompt, root first.

    `ends` are the documents' ends in tokens. Neither the question nor the prompt's last token (which must be computed)
    is in a node. An end out of order or range is ignored with all that follow. Without ends, every `chunk_tokens`
    tokens are a node.

    A key is the 32-byte BLAKE2b digest of the parent's key and the tokens (8 bytes each, little-endian); the root's
    parent is the digest of `salt`. Raises ValueError for `chunk_tokens` below 1.

    >>> [segment.tokens for segment in segments_of(range(10), [4, 7])]
    [4, 3]
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}: give 1 or more")
    return tuple(_chain(token_ids, _borders(len(token_ids), ends, chunk_tokens), salt))


def _borders(tokens: int, ends: Sequence[int], chunk_tokens: int) -> list[int]:
    borders = [0]
    for end in ends:
        if not borders[-1] < end <= tokens:
            break
        borders.append(end)
    if len(borders) == 1:
        return list(range(0, tokens, chunk_tokens))
    if borders[-1] == tokens:
        borders[-1] -= 1
    return borders


def _chain(token_ids: Sequence[int], borders: Sequence[int], salt: str | None) -> Iterator[Segment]:
    # Prompts without a salt are not those of a tenant with an empty name.
    person = b"ragorder-shared" if salt is None else b"ragorder-tenant"
    key = blake2b((salt or "").encode(), digest_size=_KEY_BYTES, person=person).digest()
    for start, end in pairwise(borders):
        if end > start:
            own = struct.pack(f"<{end - start}q", *token_ids[start:end])
            key = blake2b(key + own, digest_size=_KEY_BYTES).digest()
            yield Segment(key, end - start)
