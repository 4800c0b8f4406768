"""A prompt as a path in the knowledge tree."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Segment", "segments_of"]

_KEY_BYTES = 32


class Segment(NamedTuple):
    """A node of the knowledge tree: `tokens` tokens behind a particular prefix. `key` stands for these tokens and all
    before them, and for whose they are."""

    key: bytes
    tokens: int


def segments_of(
    token_ids: Sequence[int], ends: Sequence[int], *, salt: str | None = None, chunk_tokens: int = 256
) -> tuple[Segment, ...]:
    """The nodes of a prompt, root first.

    `ends` say where documents end, in tokens. What is in front of the first end is the first node, and so on; what is
    behind the last one is the question, and no node. An end that is not behind the one before, or not within the
    prompt, is ignored with all that follow. Without any, each `chunk_tokens` tokens are a node. The last token of a
    prompt is in no node, as it must be computed: a node that would end with it is one token shorter.

    A key is the BLAKE2b digest (32 bytes) of the parent's key and the node's tokens (8 bytes each, little-endian). The
    first parent is the digest of `salt`, so that tenants share nothing with one another. What else changes KV, model
    and layout, is no part of it.

    Raises ValueError if `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunks of {chunk_tokens} tokens cannot be: give 1 or more")
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
    tenant = blake2b(b"" if salt is None else salt.encode(), digest_size=_KEY_BYTES, person=_person(salt))
    key = tenant.digest()
    for start, end in pairwise(borders):
        if end > start:
            own = struct.pack(f"<{end - start}q", *token_ids[start:end])
            key = blake2b(key + own, digest_size=_KEY_BYTES).digest()
            yield Segment(key, end - start)


def _person(salt: str | None) -> bytes:
    """Nobody's prompts are not those of somebody with an empty name."""
    return b"ragorder-shared" if salt is None else b"ragorder-tenant"
