"""What an earlier process left in the folder."""

from __future__ import annotations

from typing import NamedTuple

from ragorder.kernels.store.counters import StoreCounters
from ragorder.kernels.store.folder import ChunkFolder
from ragorder.kernels.store.format import LONGEST_HEADER, BadHeaderError, Header
from ragorder.kernels.store.names import ChunkName

__all__ = ["Found", "Scan", "check", "scan"]


class Found(NamedTuple):
    """A chunk: its file, what that says of it, how long it is, and when it was written (seconds since the epoch)."""

    name: ChunkName
    header: Header
    bytes: int
    written: float


class Scan(NamedTuple):
    """`chunks` are those of this store, the oldest first. `occupied` are the bytes on disk of files that stay and are
    of no use, `serial` is higher than any that was used."""

    chunks: list[Found]
    occupied: int
    serial: int


def scan(folder: ChunkFolder, counters: StoreCounters) -> Scan:
    """Read the header of every file, and none of the payloads: those are verified when they are read. Half-written
    files and what is nobody's chunk are removed, other models' chunks stay; all but the half-written are counted."""
    good: list[Found] = []
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
            good.append(Found(name, header, size, status.st_mtime))
        except BadHeaderError as bad:
            counters.refuse(bad.reason)
            if regular and bad.reason != "identity":
                unwanted.append((name, size))
            else:
                occupied += folder.size_on_disk(size)
        except OSError as error:
            counters.failed_read(error)
    chunks: dict[bytes, Found] = {}
    for found in sorted(good, key=lambda found: found.name.serial):
        older = chunks.pop(found.header.key, None)
        if older is not None:
            unwanted.append((older.name, older.bytes))
        chunks[found.header.key] = found
    occupied += sum(folder.size_on_disk(size) for name, size in unwanted if not folder.remove(name))
    return Scan(list(chunks.values()), occupied, serial)


def check(folder: ChunkFolder, name: ChunkName, head: bytes, size: int) -> Header:
    """The header of a file with this beginning and this size. Raises BadHeaderError, also for "identity"."""
    header = Header.unpack(head)
    if header.identity != folder.identity:
        raise BadHeaderError("identity")
    if not name.is_of(header.key):
        raise BadHeaderError("foreign")
    if size != header.file_bytes:
        raise BadHeaderError("truncated")
    return header
