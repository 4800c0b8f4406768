"""Folder of a store: lock, identity note and chunk files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError
from ragorder.kernels.store.format import SUBFOLDER, VERSION, ChunkName, digest

LOCK = "lock"
IDENTITY = "identity"
CHUNKS = "chunks"

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_REASONS = {
    errno.EROFS: "read-only",
    errno.EACCES: "read-only",
    errno.EPERM: "read-only",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
}


class StoreRefusedError(RagorderError):
    """`reason`: "locked" (by another process), "identity" (another model's), "format" (another version), "read-only",
    "full" or "unusable"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def because_of(cls, error: OSError, folder: Path) -> StoreRefusedError:
        return cls(_REASONS.get(error.errno or 0, "unusable"), f"no store in {folder}: {error.strerror or error}")


class ChunkFolder:
    """An open folder, locked while the process lives; only the owner can read its files. A later folder at its path is
    never written to. Raises StoreRefusedError; reads and writes raise OSError."""

    def __init__(self, folder: Path, identity: str, patience_s: float = 0.0) -> None:
        self.path = folder
        self.identity = digest(identity.encode())
        self._descriptors: list[int] = []
        try:
            self._open(patience_s)
        except OSError as error:
            self.close()
            raise StoreRefusedError.because_of(error, folder) from error
        except StoreRefusedError:
            self.close()
            raise

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def size_on_disk(self, file_bytes: int) -> int:
        # Files take whole blocks of the file system.
        return -(-file_bytes // self._block_bytes) * self._block_bytes

    def bytes_of(self, name: ChunkName) -> int:
        """Return an unreadable file's size on disk, 0 if unknown."""
        try:
            return self.size_on_disk(os.stat(name.path, dir_fd=self._chunks, follow_symlinks=False).st_size)
        except OSError:
            return 0

    def names(self) -> Iterator[tuple[ChunkName, bool]]:
        with os.scandir(self._chunks) as subfolders:
            found = sorted(entry.name for entry in subfolders if SUBFOLDER.fullmatch(entry.name))
        for subfolder in found:
            try:
                descriptor = os.open(subfolder, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=self._chunks)
            except OSError:
                continue
            try:
                with os.scandir(descriptor) as files:
                    for entry in files:
                        name = ChunkName.parse(entry.name)
                        if name is not None and name.subfolder == subfolder:
                            yield name, entry.is_file(follow_symlinks=False)
            finally:
                os.close(descriptor)

    def read(self, name: ChunkName, *buffers: memoryview) -> tuple[int, os.stat_result]:
        # Non-blocking, for a pipe at this path.
        descriptor = os.open(name.path, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._chunks)
        try:
            filled = 0
            left: Sequence[memoryview] = buffers
            while left and (count := os.readv(descriptor, left)):
                filled += count
                left = _after(left, count)
            return filled, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: ChunkName, *buffers: bytes | memoryview) -> None:
        """Write by renaming a temporary file: files with final names are complete."""
        # No fsync, which would cost more than most chunks are worth: a chunk may be lost, but must not be wrong. A
        # killed process loses nothing, as the kernel has the bytes. After a power cut readers refuse incomplete
        # contents.
        temporary = name.temporary.path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        try:
            descriptor = os.open(temporary, flags, 0o600, dir_fd=self._chunks)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name.subfolder, 0o700, dir_fd=self._chunks)
            descriptor = os.open(temporary, flags, 0o600, dir_fd=self._chunks)
        try:
            left: Sequence[memoryview] = [memoryview(buffer) for buffer in buffers]
            while left:
                left = _after(left, os.writev(descriptor, left))
        finally:
            os.close(descriptor)
        os.rename(temporary, name.path, src_dir_fd=self._chunks, dst_dir_fd=self._chunks)

    def remove(self, name: ChunkName) -> bool:
        try:
            os.unlink(name.path, dir_fd=self._chunks)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _open(self, patience_s: float) -> None:
        os.makedirs(self.path, 0o700, exist_ok=True)
        root = self._keep(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._lock(root, time.monotonic() + patience_s)
        self._check_identity(root)
        with suppress(FileExistsError):
            os.mkdir(CHUNKS, 0o700, dir_fd=root)
        self._chunks = self._keep(os.open(CHUNKS, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=root))
        if os.fstat(self._chunks).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(self._chunks, 0o700)
        self._block_bytes = max(1, os.fstatvfs(self._chunks).f_frsize)

    def _keep(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor

    def _lock(self, root: int, deadline: float) -> None:
        lock = self._keep(os.open(LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=root))
        while not _locked(lock):
            if time.monotonic() >= deadline:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                raise StoreRefusedError(
                    "locked",
                    f"no store in {self.path}: process {holder or '?'} uses it: use another folder",
                )
            time.sleep(0.02)
        # The file may have been replaced before it was locked.
        if not os.path.samestat(os.fstat(lock), os.stat(LOCK, dir_fd=root, follow_symlinks=False)):
            raise StoreRefusedError("locked", f"no store in {self.path}: its lock file was replaced just now")
        # The process id is only used in messages.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def _check_identity(self, root: int) -> None:
        # Every chunk has the identity too, so that a lost note does no harm.
        found = read_identity(root)
        ours = {"format": VERSION, "identity": self.identity.hex()}
        if found is None:
            note = json.dumps(ours).encode()
            descriptor = os.open(f"{IDENTITY}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, 0o600, dir_fd=root)
            try:
                os.write(descriptor, note)
            finally:
                os.close(descriptor)
            os.rename(f"{IDENTITY}.tmp", IDENTITY, src_dir_fd=root, dst_dir_fd=root)
        elif found.get("format") != VERSION:
            raise StoreRefusedError(
                "format",
                f"no store in {self.path}: its chunks have another format version: empty it or use another folder",
            )
        elif found != ours:
            raise StoreRefusedError(
                "identity",
                f"no store in {self.path}: it holds chunks of another model, or of the same one set up differently: "
                "empty it or use another folder",
            )


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_identity(root: int) -> dict[str, object] | None:
    try:
        descriptor = os.open(IDENTITY, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=root)
    except OSError:
        return None
    try:
        note = decode(os.read(descriptor, 4096))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return note if isinstance(note, dict) and {"format", "identity"} <= note.keys() else None


def _after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    left = list(buffers)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left
