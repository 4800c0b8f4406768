"""Digests of several texts."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["digest_of"]


def digest_of(*parts: str | bytes | None) -> bytes:
    """16 bytes. The same characters, divided otherwise, have another digest."""
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"-" if encoded is None else b"%d:" % len(encoded))
        digest.update(encoded or b"")
    return digest.digest()
