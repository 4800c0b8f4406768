"""A chunk's file: a header that says whose bytes these are and how many, and then the bytes.

    magic 8 | version 2 | key length 2 | parent length 2 | 0 2 | payload length 8 | cost 8 | identity 16 | digest 16
    key | parent | digest of all the above 16 | payload

Integers are little-endian, `cost` is a double, the first digest is the payload's. The header has a digest of its own,
so that an index can be made from headers alone.

Digests are the first 128 bits of SHA-256: in the standard library, done by the processor where it can (1.6 GB/s a
thread measured, BLAKE2b 0.7, CRC-32 2.7), without Python's lock, and so long that chance never makes two equal, which
32 bits cannot promise for many terabytes. Against somebody who may write into the folder no checksum without a secret
helps: the folder is for its owner only.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import NamedTuple

__all__ = ["LONGEST_HEADER", "MAX_KEY_BYTES", "VERSION", "BadHeaderError", "Header", "digest"]

# 2: identities are over all bytes of a model's weights.
VERSION = 2
MAX_KEY_BYTES = 1024

_MAGIC = b"\x89ragKV\r\n"
_FIXED = struct.Struct("<8sHHHHQd16s16s")
_DIGEST_BYTES = 16

LONGEST_HEADER = _FIXED.size + 2 * MAX_KEY_BYTES + _DIGEST_BYTES


class BadHeaderError(Exception):
    """This is no file of a chunk that can be used. `reason` is "truncated", "foreign", "checksum" or "identity"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def digest(data: bytes | memoryview) -> bytes:
    """16 bytes that tell these from any others."""
    return sha256(data).digest()[:_DIGEST_BYTES]


class Header(NamedTuple):
    """What a file says of its chunk. `cost` is what a new token took to compute when the chunk was, in seconds (0:
    unknown); `identity` and `payload_digest` are digests."""

    key: bytes
    parent: bytes | None
    payload_bytes: int
    cost: float
    identity: bytes
    payload_digest: bytes

    @property
    def header_bytes(self) -> int:
        return _FIXED.size + len(self.key) + len(self.parent or b"") + _DIGEST_BYTES

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    def pack(self) -> bytes:
        parent = self.parent or b""
        lengths = len(self.key), len(parent), 0, self.payload_bytes
        fixed = _FIXED.pack(_MAGIC, VERSION, *lengths, self.cost, self.identity, self.payload_digest)
        head = fixed + self.key + parent
        return head + digest(head)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """The header that `data` begins with. Raises BadHeaderError."""
        if len(data) < _FIXED.size:
            raise BadHeaderError("truncated")
        magic, version, key_bytes, parent_bytes, _, payload_bytes, cost, identity, payload_digest = _FIXED.unpack_from(
            data
        )
        if magic != _MAGIC or version != VERSION:
            raise BadHeaderError("foreign")
        if not 0 < key_bytes <= MAX_KEY_BYTES or parent_bytes > MAX_KEY_BYTES:
            raise BadHeaderError("checksum")
        parent_starts = _FIXED.size + key_bytes
        ends = parent_starts + parent_bytes
        if len(data) < ends + _DIGEST_BYTES:
            raise BadHeaderError("truncated")
        if digest(data[:ends]) != data[ends : ends + _DIGEST_BYTES]:
            raise BadHeaderError("checksum")
        key, parent = data[_FIXED.size : parent_starts], data[parent_starts:ends]
        return cls(key, parent or None, payload_bytes, cost, identity, payload_digest)
