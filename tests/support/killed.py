"""Work in a process that is killed at one of its changes to files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

# What changes files, as Python's own audit hooks see it.
_CHANGES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.truncate", "sqlite3.connect"})


def changes_of(work: Callable[[], object], killed_at: int = 0) -> int | None:
    """Work in a forked process: how many changes it made, or None if it was killed at the one given."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        count, status = 0, 99

        def happened() -> None:
            nonlocal count
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            _watch(happened)
            work()
            os.write(writer, str(count).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if said else -signal.SIGKILL)
    return int(said) if said else None


def _watch(happened: Callable[[], None]) -> None:
    """Call `happened` at each change, and in the middle of each write, for the rest of this process."""
    write = os.writev

    def in_two(descriptor: int, buffers: Any) -> int:
        first = write(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]])
        happened()
        return first

    os.writev = in_two
    sys.addaudithook(lambda event, arguments: happened() if event in _CHANGES else None)
