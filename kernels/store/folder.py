"""The folder that a store lives in, and the files of its chunks."""

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

from ragorder.kernels.store.format import VERSION, digest
from ragorder.kernels.store.names import SUBFOLDER, ChunkName

__all__ = ["CHUNKS", "IDENTITY", "LOCK", "ChunkFolder", "StoreRefusedError"]

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


class StoreRefusedError(Exception):
    """There can be no store in this folder now. `reason` is "locked" (another process has it), "identity" (it holds
    another model's chunks), "format" (another version's), "read-only", "full" or "unusable"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def because_of(cls, error: OSError, folder: Path) -> StoreRefusedError:
        return cls(_REASONS.get(error.errno or 0, "unusable"), f"no store in {folder}: {error.strerror or error}")


class ChunkFolder:
    """The folder, and its lock for as long as it is open: a second one, in this process or another, is refused. The
    lock is the kernel's (flock): it goes with the process, however that ends. For that, `patience_s` are waited.

    It is made if it is not there, for its owner only, as are all files in it (0700 and 0600); of a folder that is there
    already, only what is the store's own is touched. Files are reached through the folder as it was opened: if it is
    taken away and another one put in its place, nothing is written there.

    Raises StoreRefusedError. What reads and writes raises OSError.
    """

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
        """Let go of the folder. Nothing may be read or written any more."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def size_on_disk(self, file_bytes: int) -> int:
        """What a file of so many bytes takes: whole blocks of the file system."""
        return -(-file_bytes // self._block_bytes) * self._block_bytes

    def names(self) -> Iterator[tuple[ChunkName, bool]]:
        """All files that are called as chunks are, and whether each is a regular file."""
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
        """Fill the buffers from the beginning of the file: how many bytes that was, and what the system says of it."""
        # A pipe in the file's place must not be waited for.
        descriptor = os.open(name.path, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._chunks)
        try:
            filled = 0
            left: Sequence[memoryview] = buffers
            while left and (count := os.readv(descriptor, left)):
                filled += count
                left = _behind(left, count)
            return filled, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: ChunkName, *buffers: bytes | memoryview) -> None:
        """Write a file under its temporary name, then rename it: under its own name there are only whole files.

        Nothing is forced to the disk (fsync). A chunk can be lost at any time, as it can be computed again; it must
        not be wrong, and that is what readers verify. A process that is killed loses nothing, as the kernel has the
        bytes. A machine that loses power may leave files that are whole by name and empty or in part by content: they
        are refused when they are found. An fsync a chunk would cost more than most chunks are worth.
        """
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
                left = _behind(left, os.writev(descriptor, left))
        finally:
            os.close(descriptor)
        os.rename(temporary, name.path, src_dir_fd=self._chunks, dst_dir_fd=self._chunks)

    def remove(self, name: ChunkName) -> bool:
        """Whether the file is gone now."""
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
                raise StoreRefusedError("locked", f"no store in {self.path}: process {holder or '?'} has it")
            time.sleep(0.02)
        # Somebody may have put another file there between opening and locking, and have that one's lock.
        if not os.path.samestat(os.fstat(lock), os.stat(LOCK, dir_fd=root, follow_symlinks=False)):
            raise StoreRefusedError("locked", f"no store in {self.path}: its lock was replaced just now")
        # For people and for messages only.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def _check_identity(self, root: int) -> None:
        """What the folder is says the whole; every chunk says it, too, so that a lost note does no harm."""
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
                "format", f"no store in {self.path}: it is of another version: empty it or take another"
            )
        elif found != ours:
            raise StoreRefusedError(
                "identity",
                f"no store in {self.path}: it holds chunks of another model, or of the same one set up differently: "
                "empty it or take another",
            )


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_identity(root: int) -> dict[str, object] | None:
    """What the folder's note says; None if there is none that can be read."""
    try:
        descriptor = os.open(IDENTITY, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=root)
    except OSError:
        return None
    try:
        note = json.loads(os.read(descriptor, 4096))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return note if isinstance(note, dict) and {"format", "identity"} <= note.keys() else None


def _behind(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of the buffers after so many bytes."""
    left = list(buffers)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left
