"""Replicas of stored OpenAI responses."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx2
from msgspec import Struct

from ragorder.adapters.proxy.body import decode
from ragorder.adapters.proxy.fleet import Replica
from ragorder.adapters.proxy.usage import EventLines
from ragorder.adapters.structs import readable_by_threads
from ragorder.common.lru_cache import LRUCache

__all__ = ["StoredResponses"]

_REMEMBERED = 1 << 16
# Longer answers, and longer beginnings of streams, are not read.
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
    """Replicas of the last 65,536 responses. Only its own replica can continue, show, cancel or delete a response."""

    def __init__(self) -> None:
        self._replicas: LRUCache[Replica] = LRUCache(_REMEMBERED)

    def of_body(self, content: bytes) -> Replica | None:
        body = decode(content, _Body) if b"previous_response_id" in content else None
        return None if body is None else self._replicas.get(body.previous_response_id)

    def of_target(self, target: bytes) -> Replica | None:
        named = _OF_ONE.match(target)
        return None if named is None else self._replicas.get(named[1].decode("latin-1"))

    async def read(self, response: httpx2.Response, replica: Replica) -> AsyncIterator[bytes]:
        """Note the answer's id before its end."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_read = 200 <= response.status_code < 300
        lines = EventLines() if kind == "text/event-stream" else None
        length, whole = 0, bytearray()
        async for chunk in response.aiter_raw():
            length += len(chunk)
            is_read = is_read and length <= (_MOST_BYTES if lines is None else _MOST_EVENTS_BYTES)
            if not is_read:
                whole.clear()
            elif lines is None:
                whole += chunk
            else:
                found = next(filter(None, map(_id_of_event, list(lines.feed(chunk)))), None)
                is_read = not self._remember(found, replica)
            yield chunk
        if is_read and lines is None:
            answer = decode(bytes(whole), _Response)
            self._remember(None if answer is None else answer.id, replica)

    def _remember(self, id: str | None, replica: Replica) -> bool:
        if id is not None and len(id) <= _LONGEST_ID:
            self._replicas.put(id, replica)
        return id is not None


def _id_of_event(line: bytes | None) -> str | None:
    event = decode(line[5:], _Event) if line is not None and line.startswith(b"data:") else None
    return None if event is None else event.response.id
