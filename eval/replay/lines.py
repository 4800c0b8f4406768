"""The lines of a log, plain or gzipped, and how far it is read."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragorder.eval.replay.log import LogError

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["name_of", "numbered_lines"]

_MAX_LINE_BYTES = 1 << 24
_GZIP_MAGIC = b"\x1f\x8b"
_STEPS = 100


def name_of(source: IO[bytes]) -> str:
    """The path of an open file, as it was given."""
    name = getattr(source, "name", "-")
    return name if isinstance(name, str) and name not in ("-", "<stdin>") else "<stdin>"


def numbered_lines(source: IO[bytes], name: str, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, unpacked if need be. Raises LogError."""
    buffered: Any = source if hasattr(source, "peek") else BufferedReader(source)
    stream = buffered
    size, advance_to = _watch(source, name, progress)
    number = 0
    try:
        if stream.peek(2)[:2] == _GZIP_MAGIC:
            stream = gzip.GzipFile(fileobj=stream)
        while line := stream.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES:
                raise LogError(f"{name}:{number}: longer than {_MAX_LINE_BYTES >> 20} MiB: one request a line")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if size and not number % 256:
                advance_to(source.tell())
            if line.strip():
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise LogError(f"{name}:{number + 1}: damaged gzip data: compress the log again") from None
    except OSError as error:
        raise LogError(f"{name}:{number + 1}: {error.strerror}: name a file that can be read") from None
    finally:
        advance_to(size)
        if buffered is not source:
            buffered.detach()


def _watch(source: IO[bytes], name: str, progress: Progress | None) -> tuple[int, Callable[[int], None]]:
    """The size of a file in bytes, and what is to be told how far it is read. A pipe's size is not known: 0."""
    try:
        size = os.fstat(source.fileno()).st_size
        source.tell()
    except (OSError, ValueError, AttributeError):
        size = 0
    if progress is None or not size:
        return 0, lambda position: None
    advance = progress(f"reading {Path(name).name}", _STEPS)
    told = 0

    def advance_to(position: int) -> None:
        nonlocal told
        while told < min(_STEPS, position * _STEPS // size):
            told += 1
            advance()

    return size, advance_to
