"""Usage in an answer's bytes, in any route's protocol.

Readers never raise. `served`: the prompt has been computed; `done`: nothing follows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.content_encoding import encoding_of
from ragorder.adapters.http_server.headers import Headers, header
from ragorder.adapters.proxy.bodies.body import decode
from ragorder.adapters.structs import readable_by_threads
from ragorder.adapters.usage import answers_something, read_usage

_MAX_ANSWER = 1 << 22
_MAX_LINE = 1 << 20
# Types of events, and of the last ones, of Anthropic's messages, OpenAI's responses and Cohere's chats.
_ANSWERING = re.compile(
    r"content_block_delta|message_delta|response\..+\.delta|response\.(completed|incomplete)|content-delta|message-end"
)
_ENDED = frozenset({"message_stop", "message-end", "response.completed", "response.failed", "response.incomplete"})
_ENDS = (b'"message_stop"', b'"message-end"', b'"response.')
# The counts that `read_usage` and `read_cloud_usage` read; a server may send any number of others.
_COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_COUNTS_OF_DETAILS = ("cached_tokens", "cache_write_tokens")
# Cohere's counts, which are floats.
_OF_COHERE, _COUNTS_OF_COHERE = "tokens", ("input_tokens", "output_tokens")
_LONGEST_COUNT = 12
_NOTHING = Raw(b"null")


@readable_by_threads
class _Holder(Struct):
    usage: Raw = _NOTHING


@readable_by_threads
class _Event(_Holder):
    type: Raw = _NOTHING
    choices: Raw = _NOTHING
    message: Raw = _NOTHING
    response: Raw = _NOTHING
    delta: Raw = _NOTHING


def _of_raw(name: str, *fields: str) -> type[Struct]:
    return readable_by_threads(msgspec.defstruct(name, [(field, Raw, _NOTHING) for field in fields]))


_Usage = _of_raw("_Usage", *_COUNTS, *_DETAILS, _OF_COHERE, "cached_tokens")
_CohereTokens = _of_raw("_CohereTokens", *_COUNTS_OF_COHERE)
_UsageDetails = _of_raw("_UsageDetails", *_COUNTS_OF_DETAILS)


def reader_for(headers: Headers) -> WholeReader | StreamReader:
    if encoding_of(headers) is not None:
        return WholeReader(limit=0)
    media_type = (header(headers, b"content-type") or b"").partition(b";")[0]
    if media_type.strip().lower() == b"text/event-stream":
        return StreamReader()
    declared = header(headers, b"content-length") or b""
    return WholeReader(length=int(declared) if declared.isdigit() and len(declared) < 18 else None)


class WholeReader:
    """Reader of a JSON answer of `length` bytes, if known; not read beyond `limit` bytes."""

    served = True

    def __init__(self, limit: int = _MAX_ANSWER, *, length: int | None = None) -> None:
        self._limit = limit
        self._whole_length = length
        self._length = 0
        self._body = bytearray()

    @property
    def done(self) -> bool:
        return self._length == self._whole_length

    def feed(self, chunk: bytes) -> None:
        self._length += len(chunk)
        if self._length <= self._limit:
            self._body += chunk
        else:
            self._body.clear()

    def report(self) -> dict[str, Any]:
        return _counts(decode(bytes(self._body), _Holder))

    def tbt_s(self) -> float | None:
        return None


class EventLines:
    """Lines of server-sent events, ended by LF, CR or both; None for one longer than 1 MiB."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._too_long = False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Yield the lines that a chunk ends. Read all of them."""
        for piece in chunk.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._too_long = self._too_long or len(self._line) + len(text) > _MAX_LINE
            if self._too_long:
                self._line.clear()
            else:
                self._line += text
            if len(text) < len(piece):
                line = None if self._too_long else bytes(self._line)
                self._line.clear()
                self._too_long = False
                yield line


class StreamReader:
    """Reader of server-sent events. Keeps one line, up to 1 MiB."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.served = False
        self.done = False
        self._clock = clock
        self._reported: dict[str, Any] = {}
        self._lines = EventLines()
        # Number of events with a part of the answer, and the times of the first and last one.
        self._parts = 0
        self._first_s = self._last_s = 0.0

    def feed(self, chunk: bytes) -> None:
        parts = self._parts
        for line in self._lines.feed(chunk):
            self._read(line)
        if self._parts > parts:
            self._last_s = self._clock()
            if not parts:
                self._first_s = self._last_s

    def report(self) -> dict[str, Any]:
        return self._reported

    def tbt_s(self) -> float | None:
        """Return the mean seconds between tokens, or events if no tokens are reported; None for fewer than two."""
        tokens = read_usage(self._reported).completion_tokens or self._parts
        return (self._last_s - self._first_s) / (tokens - 1) if self._parts > 1 and tokens > 1 else None

    def _read(self, line: bytes | None) -> None:
        if line is None:
            # A line too long to read is taken for a part of the answer.
            self.served = True
            self._parts += 1
            return
        if not line.startswith(b"data:"):
            return
        if line[5:].strip() == b"[DONE]":
            self.done = True
            return
        if self.served and b'"usage"' not in line and not any(end in line for end in _ENDS):
            self._parts += b'"delta"' in line or b'"text"' in line
            return
        event = decode(line[5:], _Event)
        if event is None:
            return
        kind = decode(event.type, str) or ""
        self.done = self.done or kind in _ENDED
        answers = _ANSWERING.fullmatch(kind) is not None or any(
            map(answers_something, decode(event.choices, list) or ())
        )
        self.served = self.served or answers
        self._parts += answers
        for raw in (line[5:], event.message, event.response, event.delta):
            # Anthropic's first event has the prompt's tokens, a later one the answer's.
            holder = decode(raw, _Holder)
            self._reported |= _counts(holder)


def _counts(holder: _Holder | None) -> dict[str, Any]:
    usage = None if holder is None else decode(holder.usage, _Usage)
    if usage is None:
        return {}
    if (tokens := decode(getattr(usage, _OF_COHERE), _CohereTokens)) is not None:
        read = _numbers(tokens, _COUNTS_OF_COHERE) | _numbers(usage, ("cached_tokens",))
        names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
        counts: dict[str, Any] = {names[name]: read[name] for name in _COUNTS_OF_COHERE if name in read}
        return counts | (
            {"prompt_tokens_details": {"cached_tokens": read["cached_tokens"]}} if "cached_tokens" in read else {}
        )
    details = {name: decode(getattr(usage, name), _UsageDetails) for name in _DETAILS}
    others = {name: _numbers(each, _COUNTS_OF_DETAILS) for name, each in details.items() if each is not None}
    return _numbers(usage, _COUNTS) | {name: found for name, found in others.items() if found}


def _numbers(counts: Struct, names: tuple[str, ...]) -> dict[str, int]:
    found = ((name, bytes(getattr(counts, name)).removesuffix(b".0")) for name in names)
    return {name: int(digits) for name, digits in found if digits.isdigit() and len(digits) <= _LONGEST_COUNT}
