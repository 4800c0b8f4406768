"""Cache folder of models, corpora and profiles."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragorder"


def try_lock(file: IO[bytes] | IO[str], *, unsupported: bool = False) -> bool:
    """Lock a file until this process closes it. Return False if another holds it, `unsupported` on Windows."""
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
    # A system without locks lacks the module; a file system without locks raises an error.
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
