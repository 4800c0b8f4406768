"""A chunk store whose chunks show whose bytes they are, and a system that refuses calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import shake_128
from pathlib import Path
from typing import Any

import pytest

from ragorder.kernels.store import ChunkStore
from ragorder.kernels.store.format import ChunkName, Header

IDENTITY = "a model"
PLENTY = 1 << 30
BLOCK = 4096
KEY, OTHER, THIRD = b"key" * 12, b"other" * 7, b"third" * 7
HEADER_BYTES = Header(KEY, OTHER, 5000, 0.0, bytes(16), bytes(16)).header_bytes


def content(key: bytes, size: int = 5000) -> bytes:
    """Bytes that no other key has, so that wrong ones are recognised."""
    return shake_128(key).digest(size)


def open_store(folder: Path, capacity_bytes: int = PLENTY, identity: str = IDENTITY, **settings: Any) -> ChunkStore:
    return ChunkStore(folder, capacity_bytes, identity, **{"patience_s": 0.0} | settings)


def put(store: ChunkStore, key: bytes, parent: bytes | None = None, size: int = 5000, **facts: Any) -> bool:
    return store.write(key, content(key, size), parent, **facts)


def stored(folder: Path, *keys: bytes, **settings: Any) -> ChunkStore:
    """A store with these chunks."""
    store = open_store(folder, **settings)
    for key in keys:
        assert put(store, key)
    return store


def holds(store: ChunkStore, key: bytes, size: int = 5000) -> bool:
    """Whether the store gives the chunk back. Anything else that it says is its bytes is wrong."""
    buffer = bytearray(size)
    if not store.read(key, buffer):
        return False
    assert buffer == content(key, size)
    return True


def files(folder: Path) -> list[Path]:
    return sorted((folder / "chunks").glob("??/*"))


def file_of(folder: Path, key: bytes) -> Path:
    (found,) = (path for path in files(folder) if ChunkName.parse(path.name).is_of(key))
    return found


def bytes_on_disk(folder: Path) -> int:
    return sum(-(-path.lstat().st_size // BLOCK) * BLOCK for path in files(folder))


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    """The system refuses this call."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        yield
