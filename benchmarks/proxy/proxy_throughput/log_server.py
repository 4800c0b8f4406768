"""A server for the log of shared orders."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["log_program", "log_server"]

_STARTED_S = 30.0


def log_program() -> str | None:
    """The program, if there is one."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def log_server() -> Iterator[str]:
    """Its URL. Raises OSError if it does not start."""
    program = log_program()
    if program is None:
        raise OSError("there is no valkey-server or redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        _wait_for(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(_STARTED_S)


def _wait_for(port: int) -> None:
    until = time.monotonic() + _STARTED_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
