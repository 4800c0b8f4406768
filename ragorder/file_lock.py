"""Advisory locks of files between processes."""

from __future__ import annotations

from typing import IO

__all__ = ["try_lock"]


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
