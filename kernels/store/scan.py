"""Counters of a store, and reading of its folder by any process."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ragorder.kernels.store.folder import CHUNKS, LOCK, ChunkFolder, read_identity
from ragorder.kernels.store.format import LONGEST_HEADER, SUBFOLDER, BadHeaderError, ChunkName, Header


@dataclass(slots=True)
class StoreCounters:
    """Chunks since the store was opened with `restored` ones.

    `refused` chunks leave the store, except another model's ("identity"). "foreign": another chunk; "size": not the
    buffer's; "room": none for the write. `skipped_writes` came during `pauses`. Failures are by system error.
    """

    restored: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    skipped_writes: int = 0
    pauses: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_reads: Counter[str] = field(default_factory=Counter)
    failed_writes: Counter[str] = field(default_factory=Counter)

    def failed_read(self, error: OSError) -> None:
        self.failed_reads[_name(error)] += 1

    def failed_write(self, error: OSError) -> None:
        self.failed_writes[_name(error)] += 1

    def refusals(self) -> dict[str, int]:
        found = dict(self.refused)
        if self.skipped_writes:
            found["paused"] = self.skipped_writes
        found |= {f"read_{name}": count for name, count in dict(self.failed_reads).items()}
        return found | {f"write_{name}": count for name, count in dict(self.failed_writes).items()}


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")


class FoundChunk(NamedTuple):
    name: ChunkName
    header: Header
    bytes: int
    written: float


class Scan(NamedTuple):
    """`chunks`, oldest first, bytes `occupied` by unusable files, and the next `serial`."""

    chunks: list[FoundChunk]
    occupied: int
    serial: int


def scan(folder: ChunkFolder, counters: StoreCounters) -> Scan:
    """Read all headers. Remove unfinished and unusable files; keep and count other models'."""
    good: list[FoundChunk] = []
    unwanted: list[tuple[ChunkName, int]] = []
    occupied = serial = 0
    head = memoryview(bytearray(LONGEST_HEADER))
    for name, regular in folder.names():
        serial = max(serial, name.serial + 1)
        if not name.finished:
            unwanted.append((name, 0))
            continue
        size = 0
        try:
            if not regular:
                raise BadHeaderError("foreign")
            filled, status = folder.read(name, head)
            size = status.st_size
            header = check(folder, name, bytes(head[:filled]), size)
            good.append(FoundChunk(name, header, size, status.st_mtime))
        except BadHeaderError as bad:
            counters.refused[bad.reason] += 1
            if regular and bad.reason != "identity":
                unwanted.append((name, size))
            else:
                occupied += folder.size_on_disk(size)
        except OSError as error:
            counters.failed_read(error)
            occupied += folder.bytes_of(name)
    chunks: dict[bytes, FoundChunk] = {}
    for found in sorted(good, key=lambda found: found.name.serial):
        older = chunks.pop(found.header.key, None)
        if older is not None:
            unwanted.append((older.name, older.bytes))
        chunks[found.header.key] = found
    occupied += sum(folder.size_on_disk(size) for name, size in unwanted if not folder.remove(name))
    return Scan(list(chunks.values()), occupied, serial)


def check(folder: ChunkFolder, name: ChunkName, head: bytes, size: int) -> Header:
    header = Header.unpack(head)
    if header.identity != folder.identity:
        raise BadHeaderError("identity")
    if not name.is_of(header.key):
        raise BadHeaderError("foreign")
    if size != header.file_bytes:
        raise BadHeaderError("truncated")
    return header


@dataclass(frozen=True, slots=True)
class Survey:
    chunks: int
    bytes: int
    unfinished: int
    oldest: float | None
    newest: float | None
    identity: str | None
    locked_by: str | None


def survey(folder: Path) -> Survey | None:
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not (folder / CHUNKS).is_dir():
            return None
        count = size = unfinished = 0
        oldest = newest = None
        for name, status in _files(folder):
            size += status.st_blocks * 512
            if not name.finished:
                unfinished += 1
                continue
            count += 1
            written = status.st_mtime
            oldest = written if oldest is None else min(oldest, written)
            newest = written if newest is None else max(newest, written)
        identity = read_identity(root)
        noted = None if identity is None else str(identity["identity"])
        return Survey(count, size, unfinished, oldest, newest, noted, _lock_holder(root))
    finally:
        os.close(root)


def stored_bytes(folder: Path) -> dict[str, int]:
    return {name.digest: status.st_blocks * 512 for name, status in _files(folder) if name.finished}


def _files(folder: Path) -> Iterator[tuple[ChunkName, os.stat_result]]:
    chunks = folder / CHUNKS
    subfolders = sorted(entry.path for entry in os.scandir(chunks) if SUBFOLDER.fullmatch(entry.name))
    for subfolder in subfolders:
        for entry in os.scandir(subfolder):
            name = ChunkName.parse(entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if name is not None:
                yield name, status


def _lock_holder(root: int) -> str | None:
    try:
        lock = os.open(LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "?"
    finally:
        os.close(lock)
