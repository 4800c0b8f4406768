"""A streamed response, and its answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ragorder import Document, Ordering
from ragorder.adapters.usage import answers_something, member, read_usage


@dataclass(frozen=True, slots=True)
class Answer:
    """Of the `prompt_tokens`, `cached_tokens` were reused and `written_tokens` written into a cloud's cache; unreported
    or impossible counts are None. `ttft_s`: seconds to the first token, the openai client's retries included."""

    text: str
    cached_tokens: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    ordering: Ordering[Document]
    finish_reason: str | None
    written_tokens: int | None = None

    @property
    def total_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


class Reply:
    """Response to a request sent at `sent_s` (`time.perf_counter`). `accepted`: the server has responded."""

    def __init__(self, ordering: Ordering[Document]) -> None:
        self.ordering = ordering
        self.sent_s = 0.0
        self.accepted = False
        self.pieces: list[str] = []
        self.ttft_s: float | None = None
        self._finish_reason: str | None = None
        self._usage: Any = None
        self._wire: _TailedResponse | None = None

    def watch(self, stream: Any) -> None:
        self.accepted = True
        with suppress(AttributeError):
            stream.response = self._wire = _TailedResponse(stream.response)

    def read(self, chunk: Any) -> str:
        usage, choices = member(chunk, "usage"), member(chunk, "choices")
        if usage is not None:
            self._usage = usage
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta, finish_reason = member(choice, "delta"), member(choice, "finish_reason")
        text = member(choice, "text") if delta is None else member(delta, "content")
        if finish_reason:
            self._finish_reason = str(finish_reason)
        if self.ttft_s is None and answers_something(choice):
            self.ttft_s = time.perf_counter() - self.sent_s
            self.ordering.readable()
        if not isinstance(text, str) or not text:
            return ""
        self.pieces.append(text)
        return text

    def answer(self) -> Answer:
        """Raises openai.APIConnectionError for a stream that was cut off."""
        wire, usage = self._wire, read_usage(self._usage)
        if self._finish_reason is None and not (wire and wire.tail.rstrip().endswith(b"[DONE]")):
            from openai import APIConnectionError

            request: Any = getattr(wire, "request", None)
            raise APIConnectionError(message="The stream ended before the answer was complete.", request=request)
        counts = usage.cached_tokens, usage.prompt_tokens, usage.completion_tokens
        written = None
        if self.ordering.cloud is not None:
            from ragorder.clouds import read_cloud_usage

            written = read_cloud_usage(self._usage).written_tokens
        return Answer("".join(self.pieces), *counts, self.ttft_s, self.ordering, self._finish_reason, written)


async def read_chunks(stream: Any) -> AsyncIterator[Any]:
    """Yield the chunks as mappings: the client's models cost more than all else. Raises APIError."""
    import openai

    if type(stream) is not openai.AsyncStream:
        # A wrapper of the client's stream watches its chunks.
        async for chunk in stream:
            yield chunk
        return
    response, rest, data = stream.response, b"", list[bytes]()
    async for received in response.aiter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif data and not line.strip():
                event, data = b"\n".join(data), []
                if event == b"[DONE]":
                    return
                chunk = json.loads(event)
                if error := member(chunk, "error"):
                    message = member(error, "message") or "The server ended the answer with an error."
                    raise openai.APIError(str(message), response.request, body=error)
                yield chunk


class _TailedResponse:
    """Response that keeps its last bytes: the openai client does not report [DONE]."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.tail = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def iter_bytes(self) -> Iterator[bytes]:
        for data in self._response.iter_bytes():
            self.tail = (self.tail + data)[-32:]
            yield data

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        async for data in self._response.aiter_bytes():
            self.tail = (self.tail + data)[-32:]
            yield data
