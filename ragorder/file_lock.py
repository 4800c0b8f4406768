"""Advisory locks of files between processes."""

from __future__ import annotations

from contextlib import suppress
from typing import IO

__all__ = ["try_lock", "wait_for_lock"]


def try_lock(file: IO[bytes] | IO[str], *, unsupported: bool = False) -> bool:
    """Whether no other process holds the file, which this one does until it closes it; `unsupported` on a system
    without such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        return unsupported
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def wait_for_lock(file: IO[bytes] | IO[str]) -> None:
    """Return once no other process holds the file, which this one then holds until it closes it; at once where there
    are no such locks."""
    # A system without them lacks the module; a file system without them has an error.
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
