"""Keys of a document's KV that was computed otherwise than directly behind its prefix."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["is_variant", "variant_content", "variant_key"]

_CONTENT_BYTES = 32
_HOW_BYTES = 16


def variant_key(content: bytes, how: bytes) -> bytes:
    """The key of a copy of `content` (a document's key directly behind its prefix) made as `how` says. It is on no
    prompt's path."""
    return content + blake2b(how, digest_size=_HOW_BYTES).digest()


def is_variant(key: bytes) -> bool:
    return len(key) == _CONTENT_BYTES + _HOW_BYTES


def variant_content(key: bytes) -> bytes:
    """The content of a variant; of a node directly behind its prefix the key itself."""
    return key[:_CONTENT_BYTES]
