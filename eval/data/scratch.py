"""Temporary folders that are removed with their process, also after a kill."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ragorder.common.files import try_lock

__all__ = ["OwnFolder"]

_LOCK = "owner.lock"
_YOUNG_S = 60.0


class OwnFolder:
    """A private temporary folder, made by `take`. Folders of killed processes are removed by the next process with the
    same `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock: IO[bytes] | None = None
        self.path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}")

    def take(self) -> None:
        if self._lock is not None:
            return
        _remove_abandoned(self._prefix)
        self.path.mkdir(mode=0o700)
        self._lock = (self.path / _LOCK).open("ab")
        try_lock(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove_abandoned(prefix: str) -> None:
    """Those whose lock is free. A young one may be about to be locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It may belong to another process, or go meanwhile.
        with suppress(OSError), (folder / _LOCK).open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _YOUNG_S and try_lock(file):
                shutil.rmtree(folder)
