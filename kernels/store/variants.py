"""Keys of a document's KV computed after other documents."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["is_variant", "variant_content", "variant_key"]

_CONTENT_BYTES = 32
_HOW_BYTES = 16


def variant_key(content: bytes, how: bytes) -> bytes:
    """Return the key of a copy of `content` made as `how` says, which is on no prompt's path."""
    return content + blake2b(how, digest_size=_HOW_BYTES).digest()


def is_variant(key: bytes) -> bool:
    return len(key) == _CONTENT_BYTES + _HOW_BYTES


def variant_content(key: bytes) -> bytes:
    return key[:_CONTENT_BYTES]
