"""Common beginnings of requests, and where they part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ragorder.adapters.doctor.request_log import LoggedRequest

_CHUNK = 256
# The first chunks are shorter, for requests that differ early.
_FIRST = (16, 32, 64, 128, 256)
_LONG_LINE = 40
_LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """The first request of a scope has no `earlier` one."""

    characters: int
    earlier: LoggedRequest | None


@dataclass(frozen=True, slots=True)
class Parting:
    """First difference of a request from all earlier ones, before repeated text (`at_repeated`: in such text)."""

    request: LoggedRequest
    at: int
    earlier: LoggedRequest | None
    at_repeated: bool


def find_partings(
    requests: Sequence[LoggedRequest],
    beginnings: Iterable[tuple[LoggedRequest, SharedBeginning]],
    tokens: Callable[[int], int],
) -> list[Parting]:
    repeats = _repeated_lines(requests)
    found = []
    for request, shared in beginnings:
        at = shared.characters
        later = [line for start, line in _lines(request.text) if start > at and len(line) >= _LONG_LINE]
        if tokens(sum(len(each) for each in later if _key(request, each) in repeats)) >= _LEAST_TOKENS:
            at_repeated = _key(request, _line_at(request.text, at)) in repeats
            found.append(Parting(request, at, shared.earlier, at_repeated))
    return found


def shared_beginnings(requests: Sequence[LoggedRequest]) -> list[SharedBeginning]:
    """Find, to within 256 characters, the earlier request of each one's scope with the longest common prefix."""
    by_chunks: dict[tuple[tuple[str, str], bytes], LoggedRequest] = {}
    last: dict[tuple[str, str], LoggedRequest] = {}
    found = []
    for request in requests:
        nearest, known = last.get(request.scope), True
        for digest in _digests(request.text):
            key = (request.scope, digest)
            if known and (known := key in by_chunks):
                nearest = by_chunks[key]
            by_chunks[key] = request
        last[request.scope] = request
        shared = 0 if nearest is None else common_length(request.text, nearest.text)
        found.append(SharedBeginning(shared, nearest))
    return found


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least


def _digests(text: str) -> list[bytes]:
    digest, start, found = blake2b(digest_size=16), 0, []
    ends = [*_FIRST, *range(_FIRST[-1] + _CHUNK, len(text) + 1, _CHUNK)]
    for end in ends:
        if end > len(text):
            break
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        found.append(digest.copy().digest())
        start = end
    return found


def repeated_parts(requests: Sequence[LoggedRequest]) -> list[dict[bytes, int]]:
    repeats = _repeated_lines(requests)
    return [
        {
            key: len(line)
            for _, line in _lines(request.text)
            if len(line) >= _LONG_LINE and (key := _key(request, line)) in repeats
        }
        for request in requests
    ]


def _repeated_lines(requests: Sequence[LoggedRequest]) -> set[bytes]:
    once: set[bytes] = set()
    repeated: set[bytes] = set()
    for request in requests:
        keys = {_key(request, line) for _, line in _lines(request.text)}
        repeated |= keys & once
        once |= keys
    return repeated


def _key(request: LoggedRequest, line: str) -> bytes:
    text = "\0".join((*request.scope, line.strip()))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _line_at(text: str, at: int) -> str:
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield start, line
        start += len(line) + 1
