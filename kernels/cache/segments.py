"""Prompts as paths in the knowledge tree."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, pairwise, repeat
from typing import NamedTuple

_KEY_BYTES = 32


class Segment(NamedTuple):
    """A node of `tokens` tokens; `key` identifies them, all before them, and the tenant. `content` is a document's key
    directly after the system prompt. `exact`: no copy is reused."""

    key: bytes
    tokens: int
    expected_uses: float = 0.0
    content: bytes = b""
    exact: bool = False


def segments_of(
    token_ids: Sequence[int],
    ends: Sequence[int],
    *,
    salt: str | None = None,
    chunk_tokens: int = 256,
    expected_uses: Sequence[float] = (),
    prefix_tokens: int | None = None,
) -> tuple[Segment, ...]:
    """Return the nodes of a prompt, root first.

    `ends` are the documents' ends in tokens, up to the first out of order or range. Neither the question nor the
    prompt's last token (which must be computed) is in a node. Without ends, every `chunk_tokens` tokens are a node.
    Documents after `prefix_tokens` (0 or one of the ends) have a `content`. `salt`: the tenant.

        >>> [segment.tokens for segment in segments_of(range(10), [4, 7])]
        [4, 3]
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}: give 1 or more")
    borders = _borders(len(token_ids), ends)
    if len(borders) == 1:
        borders, prefix_tokens = list(range(0, len(token_ids), chunk_tokens)), None
    forecast = bool(ends) and 0 < ends[0] <= len(token_ids)
    return tuple(_chain(token_ids, borders, salt, expected_uses if forecast else (), prefix_tokens))


def content_of(prefix: Sequence[int], document: Sequence[int], *, salt: str | None = None) -> bytes:
    return _digest(_digest(_root(salt), prefix) if prefix else _root(salt), document)


def _borders(tokens: int, ends: Sequence[int]) -> list[int]:
    borders = [0]
    for end in ends:
        if not borders[-1] < end <= tokens:
            break
        borders.append(end)
    if len(borders) > 1 and borders[-1] == tokens:
        borders[-1] -= 1
    return borders


def _chain(
    token_ids: Sequence[int],
    borders: Sequence[int],
    salt: str | None,
    expected_uses: Sequence[float],
    prefix_tokens: int | None,
) -> Iterator[Segment]:
    key = _root(salt)
    preceding = key if prefix_tokens == 0 else None
    for (start, end), uses in zip(pairwise(borders), chain(expected_uses, repeat(0.0)), strict=False):
        if end > start:
            own = token_ids[start:end]
            content = b"" if preceding is None else _digest(preceding, own)
            key = _digest(key, own)
            yield Segment(key, end - start, uses, content)
            if end == prefix_tokens:
                preceding = key


def _root(salt: str | None) -> bytes:
    # Prompts without a salt differ from those of a tenant with an empty name.
    person = b"ragorder-shared" if salt is None else b"ragorder-tenant"
    return blake2b((salt or "").encode(), digest_size=_KEY_BYTES, person=person).digest()


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=_KEY_BYTES).digest()
