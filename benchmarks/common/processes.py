"""Processes that measurements start and end, with what they take."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal, NamedTuple

from ragorder.eval.data.machine import status_mb
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


def peak_mb(process: int) -> float | None:
    """The most memory that a process has had; None where the system does not report it."""
    return status_mb(str(process), "VmHWM:")


def cpu_s(process: int) -> float | None:
    """The processor time that a process has used; None where the system does not report it."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as line:
            # The second field, in brackets, may have blanks in it.
            fields = line.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def tree_of(process: int) -> list[int]:
    """Return a process, its running children, and theirs."""
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="utf-8") as line:
            children = list(map(int, line.read().split()))
    except OSError:
        children = []
    return [process, *(each for child in children for each in tree_of(child))]


def tree_cpu_s(process: int) -> float | None:
    """Return the processor time of a process and its running children."""
    used = [cpu_s(each) for each in tree_of(process)]
    return None if None in used else sum(each for each in used if each is not None)
