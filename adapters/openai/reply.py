"""What comes back: one streamed response, read chunk by chunk, and the answer that it was."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ragorder import Document, Ordering

__all__ = ["Answer", "Reply"]

_OUTPUT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
_MAX_COUNT = 1 << 32


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered.

    `cached_tokens` of the `prompt_tokens` were reused from the prefix cache. Token counts are None where the server
    does not report them, or reports what cannot be. `ttft_s` are the seconds from sending the request to its first
    token, repeats by the openai client included (None: there was no token).
    """

    text: str
    cached_tokens: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    ordering: Ordering[Document]
    finish_reason: str | None

    @property
    def total_tokens(self) -> int | None:
        """The tokens of prompt and answer together."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


class Reply:
    """The response to a request, in any server's dialect: whatever the chunks hold, `read` raises nothing. `sent_s` is
    when the request was sent, by time.perf_counter; `accepted` whether there is a response at all."""

    def __init__(self, ordering: Ordering[Document]) -> None:
        self.ordering = ordering
        self.sent_s = 0.0
        self.accepted = False
        self.pieces: list[str] = []
        self.ttft_s: float | None = None
        self._finish_reason: str | None = None
        self._usage: Any = None
        self._wire: _Wire | None = None

    def watch(self, stream: Any) -> None:
        """The server accepted the request: this stream gives the chunks."""
        self.accepted = True
        with suppress(AttributeError):
            stream.response = self._wire = _Wire(stream.response)

    def read(self, chunk: Any) -> str:
        """The text of a chunk ("" for none)."""
        usage, choices = _get(chunk, "usage"), _get(chunk, "choices")
        if usage is not None:
            self._usage = usage
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta, finish_reason = _get(choice, "delta"), _get(choice, "finish_reason")
        text = _get(choice, "text") if delta is None else _get(delta, "content")
        if finish_reason:
            self._finish_reason = str(finish_reason)
        # A chat opens with a chunk that names the role: some servers send it before they have computed anything.
        is_token = isinstance(text, str) if delta is None else any(_get(delta, name) for name in _OUTPUT)
        if self.ttft_s is None and (is_token or finish_reason):
            self.ttft_s = time.perf_counter() - self.sent_s
        if not isinstance(text, str) or not text:
            return ""
        self.pieces.append(text)
        return text

    def answer(self) -> Answer:
        """The answer, once the stream has ended. Raises openai.APIConnectionError if it ended before the answer did."""
        wire, usage = self._wire, self._usage
        if self._finish_reason is None and not (wire and wire.tail.rstrip().endswith(b"[DONE]")):
            from openai import APIConnectionError

            request: Any = getattr(wire, "request", None)
            raise APIConnectionError(message="The stream ended before the answer was complete.", request=request)
        prompt_tokens = _count(_get(usage, "prompt_tokens"))
        cached_tokens = _count(_get(_get(usage, "prompt_tokens_details"), "cached_tokens"))
        if cached_tokens is not None and (prompt_tokens is None or cached_tokens > prompt_tokens):
            cached_tokens = None
        completion_tokens = _count(_get(usage, "completion_tokens"))
        counts = cached_tokens, prompt_tokens, completion_tokens
        return Answer("".join(self.pieces), *counts, self.ttft_s, self.ordering, self._finish_reason)


class _Wire:
    """An HTTP response, with an eye on its last bytes: the openai client keeps to itself whether it saw [DONE]."""

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


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None
