"""A look at a store's folder from outside, whoever has it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ragorder.kernels.store.folder import CHUNKS, LOCK, read_identity
from ragorder.kernels.store.names import SUBFOLDER, ChunkName

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """`chunks` and their `bytes` on the disk; `unfinished` are files that are being written, or were when a process was
    killed. `oldest` and `newest` say when they were written (seconds since the epoch; None without chunks), `identity`
    whose they are (None: the folder does not say), `locked_by` which process has the folder (None: nobody does; "?":
    one that does not say)."""

    chunks: int
    bytes: int
    unfinished: int
    oldest: float | None
    newest: float | None
    identity: str | None
    locked_by: str | None


def survey(folder: Path) -> Survey | None:
    """What is in the folder, by names and sizes: no file is read, nothing is changed, and a store that is at work there
    may be ahead. None if this is no store's folder. Raises OSError if it is not there or cannot be looked into."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        identity = read_identity(root)
        chunks = folder / CHUNKS
        if identity is None and not chunks.is_dir():
            return None
        count = size = unfinished = 0
        oldest = newest = None
        subfolders = sorted(entry.path for entry in os.scandir(chunks) if SUBFOLDER.fullmatch(entry.name))
        for subfolder in subfolders:
            for entry in os.scandir(subfolder):
                name = ChunkName.parse(entry.name)
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if name is None:
                    continue
                size += status.st_blocks * 512
                if not name.finished:
                    unfinished += 1
                    continue
                count += 1
                written = status.st_mtime
                oldest = written if oldest is None else min(oldest, written)
                newest = written if newest is None else max(newest, written)
        return Survey(
            count,
            size,
            unfinished,
            oldest,
            newest,
            None if identity is None else str(identity["identity"]),
            _holder(root),
        )
    finally:
        os.close(root)


def _holder(root: int) -> str | None:
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
