"""OpenAI's responses that a server keeps, by the replica that has them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx2
from msgspec import Struct

from ragorder.adapters.proxy.body import decode
from ragorder.adapters.proxy.replica import Replica
from ragorder.adapters.structs import readable_by_threads
from ragorder.lru_cache import LRUCache

__all__ = ["StoredResponses"]

_REMEMBERED = 1 << 16
# A longer answer, or beginning of a stream, is not read.
_MOST_BYTES = 1 << 22
_MOST_EVENTS_BYTES = 1 << 16
_OF_ONE = re.compile(rb"/v1/responses/([^/?]+)")
_LONGEST_ID = 512


@readable_by_threads
class _Response(Struct):
    id: str


@readable_by_threads
class _Event(Struct):
    response: _Response


@readable_by_threads
class _Body(Struct):
    previous_response_id: str


class StoredResponses:
    """The replicas of the last 65,536 responses: only that one can continue, show, cancel or delete one of them."""

    def __init__(self) -> None:
        self._replicas: LRUCache[Replica] = LRUCache(_REMEMBERED)

    def of_body(self, content: bytes) -> Replica | None:
        """The replica of the response that is continued."""
        body = decode(content, _Body) if b"previous_response_id" in content else None
        return None if body is None else self._replicas.get(body.previous_response_id)

    def of_target(self, target: bytes) -> Replica | None:
        """The replica of the response that the path names."""
        named = _OF_ONE.match(target)
        return None if named is None else self._replicas.get(named[1].decode("latin-1"))

    async def read(self, response: httpx2.Response, replica: Replica) -> AsyncIterator[bytes]:
        """The answer's pieces. What it calls itself is remembered before its end, or with its first event."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        streamed = kind == "text/event-stream"
        limit = _MOST_EVENTS_BYTES if streamed else _MOST_BYTES
        kept: list[bytes] | None = [] if 200 <= response.status_code < 300 else None
        length = 0
        async for chunk in response.aiter_raw():
            length += len(chunk)
            if length > limit:
                kept = None
            if kept is not None:
                kept.append(chunk)
                if streamed and self._remember(_id_of_events(b"".join(kept)), replica):
                    kept = None
            yield chunk
        if kept is not None and not streamed:
            whole = decode(b"".join(kept), _Response)
            self._remember(None if whole is None else whole.id, replica)

    def _remember(self, id: str | None, replica: Replica) -> bool:
        if id is not None and len(id) <= _LONGEST_ID:
            self._replicas.put(id, replica)
        return id is not None


def _id_of_events(content: bytes) -> str | None:
    for line in content.split(b"\n")[:-1]:
        event = decode(line[5:], _Event) if line.startswith(b"data:") else None
        if event is not None:
            return event.response.id
    return None
