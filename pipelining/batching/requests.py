"""Requests, their traces and answers in a batching server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from ragorder.errors import RagorderError
from ragorder.pipelining.protocols import AnswerChunk, D, PipelineTrace, Q, Usage
from ragorder.pipelining.servers import AnswerStream

WorkerName = Literal["retrieval", "generation"]
EventName = Literal["began", "ended", "failed", "relieved", "reorganised"]
RequestOutcome = Literal["running", "answered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A worker after an event. `batch`: the most requests that may run; `seconds`: of the batch or request."""

    at_s: float
    worker: WorkerName
    event: EventName
    batch: int
    running: int
    waiting: int
    kv_tokens: int | None = None
    partitions: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class RequestTrace:
    """Times of one request by the server's clock, in seconds (None: not yet).

    `retrieval_batch`, `generation_batch`: the most requests beside it, itself included; `failures`: of its batches.
    """

    arrived_s: float
    retrieval_began_s: float | None = None
    found_s: float | None = None
    generation_began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    retrieval_batch: int = 0
    generation_batch: int = 0
    failures: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    outcome: RequestOutcome = "running"
    generation: PipelineTrace = field(default_factory=PipelineTrace, repr=False)

    @property
    def waited_s(self) -> float | None:
        began_s, found_s, sent_s = self.retrieval_began_s, self.found_s, self.generation_began_s
        if began_s is None or found_s is None or sent_s is None:
            return None
        return began_s - self.arrived_s + sent_s - found_s

    def as_record(self) -> dict[str, Any]:
        """Return fields for JSON, without the request's texts."""
        names = [name for name in self.__slots__ if name != "generation"]
        return {name: getattr(self, name) for name in names}


_NO_LIMIT = 1 << 30


class AnswerChangedError(RagorderError, RuntimeError):
    """A repeated generation differs from the text that was streamed before a failure."""


@dataclass(frozen=True, slots=True)
class BatchedAnswer(Generic[D]):
    text: str
    documents: Sequence[D]
    usage: Usage | None
    trace: RequestTrace


@dataclass(eq=False, slots=True)
class BatchedRequest(Generic[Q, D]):
    """A question in the server; `ended` is set exactly once.

    - `checkpoint`: results of a failed search for the next one
    - `most`: the largest batch that it may run in, smaller after each failure
    - `alone`, `reliefs`: failures without other requests, and how often memory was freed
    - `peak`: most requests that ran at once in its worker; `sent`: its documents have been ordered
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
        self.most, self.alone, self.reliefs = _NO_LIMIT, 0, 0

    def begin_answer(self) -> None:
        self.sent = True
        self._text.clear()
        self._usage = None
        self.trace.generation = type(self.trace.generation)()

    def add(self, chunk: AnswerChunk) -> None:
        """Raises AnswerChangedError if the text differs from what was streamed before."""
        self._usage = chunk.usage or self._usage
        if not chunk.text:
            return
        self._text.append(chunk.text)
        if self.chunks is None:
            return
        text, before = "".join(self._text), self._streamed
        if text[: len(before)] != before[: len(text)]:
            raise AnswerChangedError("a partly streamed answer failed, and begins differently when it is repeated")
        if len(text) > len(before):
            self.chunks.put_nowait(text[len(before) :])
            self._streamed = text

    def finish(self, now_s: float) -> None:
        if self.ended.done():
            return
        text = "".join(self._text)
        if len(text) < len(self._streamed):
            self.fail(AnswerChangedError("a partly streamed answer failed, and is shorter when it is repeated"), now_s)
            return
        usage = self._usage
        self.trace.outcome, self.trace.ended_s = "answered", now_s
        if usage is not None:
            self.trace.prompt_tokens, self.trace.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            self.trace.answer_tokens = usage.completion_tokens
        self.ended.set_result(BatchedAnswer(text, self.documents, usage, self.trace))
        self._end()

    def fail(self, error: BaseException, now_s: float) -> None:
        if self.ended.done():
            return
        if isinstance(error, StopIteration):
            # A future cannot hold it.
            error = RuntimeError("the retrieval or the engine raised StopIteration")
        self.trace.outcome, self.trace.ended_s = "failed", now_s
        self.ended.set_exception(error)
        # A cancelled caller does not read the error, about which asyncio would warn.
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


class BatchedStream(AnswerStream[str | BatchedAnswer[D]]):
    """Text of an answer; at its end the `answer`."""

    answer: BatchedAnswer[D] | None = None

    def _read(self, part: str | BatchedAnswer[D]) -> str:
        if isinstance(part, str):
            return part
        self.answer = part
        return ""
