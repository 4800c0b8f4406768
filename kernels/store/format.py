"""Format of a chunk's file, its name `ab/ab12….<serial>.kv`, and variants' keys."""

from __future__ import annotations

import re
import struct
from hashlib import blake2b, sha256
from typing import NamedTuple

from xxhash import xxh3_128_digest

from ragorder.errors import RagorderError

# A file:
#
#     magic 8 | version 2 | key length 2 | parent length 2 | 0 2 | payload length 8 | cost 8 | identity 16 | checksum 16
#     key | parent | checksum of all the above 16 | payload
#
# Integers are little-endian, `cost` is a double, the first checksum is the payload's. The header has its own, so that
# an index can be built from headers alone. Checksums are xxh3_128: 8 GB/s a thread measured, without Python's lock
# (SHA-256 0.8, BLAKE2b 0.7). Keys and identities are hashed with SHA-256. No checksum without a secret stops an
# attacker who can write to the folder: it is for its owner only.
#
# A name has a digest of the key, which spreads files over 256 subfolders, and the number of the write: the late removal
# of an old file cannot hit its successor, and the highest serial is the newest.

# 2: identities are over all bytes of a model's weights. 3: checksums are xxh3_128.
VERSION = 3
MAX_KEY_BYTES = 1024
SUBFOLDER = re.compile(r"[0-9a-f]{2}")

_MAGIC = b"\x89ragKV\r\n"
_FIXED = struct.Struct("<8sHHHHQd16s16s")
_DIGEST_BYTES = 16
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.(kv|tmp)")

LONGEST_HEADER = _FIXED.size + 2 * MAX_KEY_BYTES + _DIGEST_BYTES


class BadHeaderError(RagorderError):
    """`reason`: "truncated", "foreign", "format", "checksum" or "identity"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def digest(data: bytes) -> bytes:
    return sha256(data).digest()[:_DIGEST_BYTES]


def checksum(data: bytes | memoryview) -> bytes:
    return xxh3_128_digest(data)


class Header(NamedTuple):
    """`cost`: seconds per new token, 0 if unknown; `identity`: a digest."""

    key: bytes
    parent: bytes | None
    payload_bytes: int
    cost: float
    identity: bytes
    payload_checksum: bytes

    @property
    def header_bytes(self) -> int:
        return _FIXED.size + len(self.key) + len(self.parent or b"") + _DIGEST_BYTES

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    def pack(self) -> bytes:
        parent = self.parent or b""
        lengths = len(self.key), len(parent), 0, self.payload_bytes
        fixed = _FIXED.pack(_MAGIC, VERSION, *lengths, self.cost, self.identity, self.payload_checksum)
        head = fixed + self.key + parent
        return head + checksum(head)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        if len(data) < _FIXED.size:
            raise BadHeaderError("truncated")
        magic, version, key_bytes, parent_bytes, _, payload_bytes, cost, identity, payload_checksum = (
            _FIXED.unpack_from(data)
        )
        if magic != _MAGIC:
            raise BadHeaderError("foreign")
        if version != VERSION:
            raise BadHeaderError("format")
        if not 0 < key_bytes <= MAX_KEY_BYTES or parent_bytes > MAX_KEY_BYTES:
            raise BadHeaderError("checksum")
        parent_starts = _FIXED.size + key_bytes
        ends = parent_starts + parent_bytes
        if len(data) < ends + _DIGEST_BYTES:
            raise BadHeaderError("truncated")
        if checksum(data[:ends]) != data[ends : ends + _DIGEST_BYTES]:
            raise BadHeaderError("checksum")
        key, parent = data[_FIXED.size : parent_starts], data[parent_starts:ends]
        return cls(key, parent or None, payload_bytes, cost, identity, payload_checksum)


class ChunkName(NamedTuple):
    """`digest`: the key's, in hexadecimal. Only temporary files are not `finished`."""

    digest: str
    serial: int
    finished: bool = True

    @classmethod
    def of(cls, key: bytes, serial: int) -> ChunkName:
        return cls(digest(key).hex(), serial)

    @classmethod
    def parse(cls, file_name: str) -> ChunkName | None:
        match = _NAME.fullmatch(file_name)
        return match and cls(match[1], int(match[2], 16), match[3] == "kv")

    @property
    def subfolder(self) -> str:
        return self.digest[:2]

    @property
    def path(self) -> str:
        return f"{self.subfolder}/{self.digest}.{self.serial:016x}.{'kv' if self.finished else 'tmp'}"

    @property
    def temporary(self) -> ChunkName:
        return self._replace(finished=False)

    def is_of(self, key: bytes) -> bool:
        return self.digest == digest(key).hex()


_CONTENT_BYTES = 32
_HOW_BYTES = 16


def variant_key(content: bytes, how: bytes) -> bytes:
    """Return the key, on no prompt's path, of a copy of `content` made in the way `how`."""
    return content + blake2b(how, digest_size=_HOW_BYTES).digest()


def is_variant(key: bytes) -> bool:
    return len(key) == _CONTENT_BYTES + _HOW_BYTES


def variant_content(key: bytes) -> bytes:
    return key[:_CONTENT_BYTES]
