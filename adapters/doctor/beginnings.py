"""Text that a request has in common with the beginning of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ragorder.adapters.doctor.request_log import LoggedRequest

__all__ = ["SharedBeginning", "common_length", "shared_beginnings"]

_CHUNK = 256
# Where a request and all before it part at once, the first chunks are shorter.
_FIRST = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """`characters` that the request has in common with the beginning of `earlier` (None: it is the first of its
    scope)."""

    characters: int
    earlier: LoggedRequest | None


def shared_beginnings(requests: Sequence[LoggedRequest]) -> list[SharedBeginning]:
    """For each request the earlier one of its scope whose beginning it shares furthest, to 256 characters."""
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


def common_length(one: str, other: str) -> int:
    """Characters that two texts begin with."""
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
