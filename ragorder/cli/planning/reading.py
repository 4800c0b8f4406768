"""The input of a plan, read once and spilled to disk."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from io import RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from ragorder.cli.planning.folder import PlanError, PlanFolder
from ragorder.cli.planning.requests import RequestToOrder, read_requests
from ragorder.cli.planning.spill import Row, SpillWriter
from ragorder.common.jsonl import name_of
from ragorder.common.request_lines import UnreadFields
from ragorder.trie.shards import ShardRequest

Progress = Callable[[str, int], Callable[[], None]]
"""Returns, for a label and a number of steps, a function to call after each step."""

T = TypeVar("T")

_STEPS = 100
_SAMPLE = 1000
_CHECKED_EVERY = 1 << 14
# Requests as they were read and as they were dealt, for a while both; results are about as long.
_COPIES = 2.2
_PIECE = 1 << 20


class _Digested(RawIOBase):
    def __init__(self, source: IO[bytes]) -> None:
        self.name = name_of(source)
        self._source = source
        self._digest = blake2b(digest_size=16)
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.size += len(data)
        return len(data)

    def fileno(self) -> int:
        return self._source.fileno()

    def tell(self) -> int:
        return self._source.tell()

    def identity(self) -> dict[str, Any]:
        while self.read(_PIECE):
            pass
        return {"bytes": self.size, "blake2b": self._digest.hexdigest()}


def identify(source: IO[bytes], progress: Progress) -> dict[str, Any]:
    digested = _Digested(source)
    try:
        size = os.fstat(source.fileno()).st_size
    except (OSError, AttributeError):
        size = 0
    pieces = iter(partial(digested.read, _PIECE), b"")
    for _ in counted(pieces, -(-size // _PIECE), f"reading {Path(digested.name).name}", progress):
        pass
    return digested.identity()


def read_input(
    folder: PlanFolder, source: IO[bytes], document_tokens: int, unread: UnreadFields, progress: Progress
) -> dict[str, Any]:
    digested = _Digested(source)
    requests = documents = 0
    with SpillWriter([folder.whole]) as spill:
        given: Any = digested
        for request in read_requests(given, document_tokens, unread=unread, progress=progress):
            numbers, text = _spilled(request)
            spill.add(Row(request.index, len(text), numbers), text)
            requests += 1
            documents += len(numbers.documents)
            if not requests % _CHECKED_EVERY:
                require_space(folder.path, spill.written_bytes)
    return {"input": digested.identity(), "requests": requests, "documents": documents}


def needed_bytes(source: IO[bytes], document_tokens: int) -> int:
    """Estimate a plan's bytes on the disk from the first requests; 0 for a pipe."""
    try:
        known = stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except (OSError, AttributeError):
        known = False
    if not known or not Path(name_of(source)).is_file():
        return 0
    spilled = 0
    with open(name_of(source), "rb") as sample:
        for request in islice(read_requests(sample, document_tokens), _SAMPLE):
            numbers, text = _spilled(request)
            spilled += len(Row(0, 0, numbers).encoded()) + len(text)
        read, size = sample.tell(), os.fstat(sample.fileno()).st_size
    return int(_COPIES * spilled * size / max(1, read))


def require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PlanError(
            f"the disk of {folder} has {free / 2**20:,.1f} MiB free, and the plan needs about {needed / 2**20:,.1f} "
            "MiB: make room, or name a folder on another disk"
        )


def counted(items: Iterable[T], total: int, label: str, progress: Progress) -> Iterator[T]:
    advance, done = progress(label, _STEPS), 0
    for number, item in enumerate(items, 1):
        yield item
        while done < min(_STEPS, number * _STEPS // max(1, total)):
            advance()
            done += 1


def _spilled(request: RequestToOrder) -> tuple[ShardRequest, bytes]:
    documents = request.documents
    # Names as text that is the same in every process.
    names = [repr(document.key) for document in documents]
    scope = None if request.scope == (None, None) else repr(request.scope)
    numbers = ShardRequest.of(names, [document.token_count for document in documents], scope)
    return numbers, json.dumps([request.echo, request.ids]).encode()
