"""Processes that measurements start and end."""

from __future__ import annotations

import re
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal, NamedTuple

from ragorder.eval.engines.base import EngineError

_END_S = 60.0
# Of what a server has said, if it does not start.
_LINES = 40
Stream = Literal["stdout", "stderr"]


class ServerProcess(NamedTuple):
    port: int
    pid: int


@contextmanager
def started(command: Sequence[str], stream: Stream, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process with a pipe from this stream, and end it with the block."""
    pipes: dict[str, Any] = {stream: subprocess.PIPE} | options
    process = subprocess.Popen(command, text=True, **pipes)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def server_process(command: Sequence[str], stream: Stream, address: str, **options: Any) -> Iterator[ServerProcess]:
    """Start a server that says its port on this stream, group 1 of the pattern `address`. Raises EngineError."""
    with started(command, stream, stdin=subprocess.DEVNULL, **options) as process:
        said: IO[str] = getattr(process, stream)
        port = _port(said, address)
        # An unread pipe would block the process in the end.
        threading.Thread(target=said.read, daemon=True).start()
        yield ServerProcess(port, process.pid)


def _port(said: IO[str], address: str) -> int:
    lines: deque[str] = deque(maxlen=_LINES)
    for line in said:
        if found := re.search(address, line):
            return int(found[1])
        lines.append(line)
    raise EngineError(f"a server did not start: {''.join(lines)}")
