"""Usage of an answer, read from its bytes as they pass, in the protocol of any route.

Readers never raise. `served`: the prompt has been computed; `done`: the answer says that nothing follows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ragorder.adapters.http_server.headers import Headers, header
from ragorder.adapters.proxy.body import decode
from ragorder.adapters.usage import ReportedUsage, answers_something, member, read_usage

__all__ = ["StreamReader", "WholeReader", "reader_for"]

_MAX_ANSWER = 1 << 22
_MAX_LINE = 1 << 20
# Types of events, and of the last ones, of Anthropic's messages and OpenAI's responses.
_ANSWERING = re.compile(r"content_block_delta|message_delta|response\..+\.delta|response\.(completed|incomplete)")
_ENDED = frozenset({"message_stop", "response.completed", "response.failed", "response.incomplete"})
_ENDS = (b'"message_stop"', b'"response.')


def reader_for(headers: Headers) -> WholeReader | StreamReader:
    if (header(headers, b"content-encoding") or b"identity").lower() != b"identity":
        return WholeReader(limit=0)
    media_type = (header(headers, b"content-type") or b"").partition(b";")[0]
    return StreamReader() if media_type.strip().lower() == b"text/event-stream" else WholeReader()


class WholeReader:
    """One piece of JSON, not read beyond `limit` bytes."""

    served = True
    done = False

    def __init__(self, limit: int = _MAX_ANSWER) -> None:
        self._limit = limit
        self._length = 0
        self._chunks: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self._length += len(chunk)
        if self._length <= self._limit:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    def report(self) -> Any:
        """The usage as it came."""
        return member(decode(b"".join(self._chunks), object), "usage")

    def usage(self) -> ReportedUsage:
        return read_usage(self.report())

    def tbt_s(self) -> float | None:
        """Unknown: all tokens came together."""
        return None


class StreamReader:
    """Server-sent events; keeps one line, up to 1 MiB."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.served = False
        self.done = False
        self._clock = clock
        self._reported: dict[str, Any] = {}
        self._line = bytearray()
        self._too_long = False
        # Events with a part of the answer, and when the first and the last of them came.
        self._parts = 0
        self._first_s = self._last_s = 0.0

    def feed(self, chunk: bytes) -> None:
        first, *others = chunk.split(b"\n")
        self._extend(first)
        parts = self._parts
        for piece in others:
            self._end_line()
            self._extend(piece)
        if self._parts > parts:
            self._last_s = self._clock()
            if not parts:
                self._first_s = self._last_s

    def report(self) -> Any:
        return self._reported

    def usage(self) -> ReportedUsage:
        return read_usage(self._reported)

    def tbt_s(self) -> float | None:
        """Mean seconds between the tokens of the answer; without reported tokens an event counts as one. None for an
        answer in fewer than two events, whose tokens came together."""
        tokens = self.usage().completion_tokens or self._parts
        return (self._last_s - self._first_s) / (tokens - 1) if self._parts > 1 and tokens > 1 else None

    def _extend(self, piece: bytes) -> None:
        self._too_long = self._too_long or len(self._line) + len(piece) > _MAX_LINE
        if self._too_long:
            self._line.clear()
        else:
            self._line += piece

    def _end_line(self) -> None:
        line, too_long = bytes(self._line), self._too_long
        self._line.clear()
        self._too_long = False
        # What is too long to be read is no event without an answer in it.
        self.served = self.served or too_long
        self._parts += too_long
        last = line.rstrip() == b"data: [DONE]"
        self.done = self.done or last
        if last or not line.startswith(b"data:"):
            return
        if self.served and b'"usage"' not in line and not any(end in line for end in _ENDS):
            self._parts += b'"delta"' in line or b'"text"' in line
            return
        event = decode(line[5:], object)
        if not isinstance(event, Mapping):
            return
        kind = event.get("type")
        self.done = self.done or (isinstance(kind, str) and kind in _ENDED)
        answers = _has_token(event)
        self.served = self.served or answers
        self._parts += answers
        for holder in (event, event.get("message"), event.get("response")):
            report = member(holder, "usage")
            if isinstance(report, Mapping):
                # Anthropic's first event has the prompt's tokens, a later one the answer's.
                self._reported |= {name: count for name, count in report.items() if count is not None}


def _has_token(event: Mapping[Any, Any]) -> bool:
    kind = event.get("type")
    if isinstance(kind, str) and _ANSWERING.fullmatch(kind):
        return True
    choices = event.get("choices")
    return any(answers_something(choice) for choice in (choices if isinstance(choices, list) else ()))
