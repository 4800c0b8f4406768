"""Requests on their way through both queues of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ragorder.pipelining.batching.trace import RequestTrace
from ragorder.pipelining.protocols import AnswerChunk, Usage

__all__ = ["AnswerChangedError", "BatchedAnswer", "BatchedRequest"]

Q = TypeVar("Q")
D = TypeVar("D")

_NO_LIMIT = 1 << 30


class AnswerChangedError(RuntimeError):
    """An answer that was streamed in part, and failed, was generated again, and began otherwise."""


@dataclass(frozen=True, slots=True)
class BatchedAnswer(Generic[D]):
    """`documents` in rank order; `usage` is the engine's report."""

    text: str
    documents: Sequence[D]
    usage: Usage | None
    trace: RequestTrace


@dataclass(eq=False, slots=True)
class BatchedRequest(Generic[Q, D]):
    """A question from its arrival to its end, which `ended` tells exactly once.

    `checkpoint` is what a search has found so far, and left to the next one by its retrieval. `most`: the largest batch
    in which it may run, smaller after each failure; `alone`: failures in a batch of its own; `peak`: the most requests
    that ran beside it in its worker, itself included; `sent`: its documents have been ordered.
    """

    question: Q
    trace: RequestTrace
    ended: asyncio.Future[BatchedAnswer[D]]
    chunks: asyncio.Queue[str | None] | None = None
    documents: Sequence[D] = ()
    checkpoint: Any = None
    cancel_search: Callable[[], object] | None = None
    most: int = _NO_LIMIT
    alone: int = 0
    reliefs: int = 0
    peak: int = 0
    sent: bool = False
    abandoned: bool = False
    _text: list[str] = field(default_factory=list)
    _streamed: str = ""
    _usage: Usage | None = None

    def lift_limits(self) -> None:
        """For the next worker: what one could not do says nothing about the other."""
        self.most, self.alone, self.reliefs = _NO_LIMIT, 0, 0

    def begin_answer(self) -> None:
        """Once more after a failure."""
        self.sent = True
        self._text.clear()
        self._usage = None
        self.trace.generation = type(self.trace.generation)()

    def add(self, chunk: AnswerChunk) -> None:
        """Raises AnswerChangedError if this answer is not the one that was streamed before a failure."""
        self._usage = chunk.usage or self._usage
        if not chunk.text:
            return
        self._text.append(chunk.text)
        if self.chunks is None:
            return
        if len(text := "".join(self._text)) <= len(self._streamed):
            if not self._streamed.startswith(text):
                raise AnswerChangedError("the answer failed in the middle, and began otherwise when generated again")
            return
        if not text.startswith(self._streamed):
            raise AnswerChangedError("the answer failed in the middle, and began otherwise when generated again")
        self.chunks.put_nowait(text[len(self._streamed) :])
        self._streamed = text

    def finish(self, now_s: float) -> None:
        if self.ended.done():
            return
        text = "".join(self._text)
        if len(text) < len(self._streamed):
            self.fail(
                AnswerChangedError("the answer failed in the middle, and was shorter when generated again"), now_s
            )
            return
        usage = self._usage
        self.trace.outcome, self.trace.ended_s = "answered", now_s
        if usage is not None:
            self.trace.prompt_tokens, self.trace.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self.ended.set_result(BatchedAnswer(text, self.documents, usage, self.trace))
        self._end()

    def fail(self, error: BaseException, now_s: float) -> None:
        if self.ended.done():
            return
        if isinstance(error, StopIteration):
            # No future takes it.
            error = RuntimeError("a generator of the retrieval or the engine ended within another")
        self.trace.outcome, self.trace.ended_s = "failed", now_s
        self.ended.set_exception(error)
        # A caller that has been cancelled reads no error.
        self.ended.exception()
        self._end()

    def cancel(self, now_s: float) -> None:
        self.abandoned = True
        if self.ended.done():
            return
        self.trace.outcome, self.trace.ended_s = "cancelled", now_s
        self.ended.cancel()
        if self.cancel_search is not None:
            self.cancel_search()
        self._end()

    def _end(self) -> None:
        self.checkpoint = self.cancel_search = None
        if self.chunks is not None:
            self.chunks.put_nowait(None)
