"""Feedback from LlamaIndex by spans and events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments, currentframe
from types import FrameType
from typing import Any
from weakref import ref

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined, unused-ignore]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor

from ragorder.adapters.usage import member, read_usage
from ragorder.ordering import Ordering
from ragorder.protocols import OrdererLike

_STREAMED_SILENTLY = (
    "answers are streamed without usage, so the engine's cached tokens are unknown: give the LLM "
    'additional_kwargs={"stream_options": {"include_usage": True}}'
)


class _RequestSpan(BaseSpan):
    """`generator`: the last one returned, which may call a model when it is read."""

    retrieves: bool = False
    calls_model: bool = False
    request: Any = None
    orderings: list[tuple[Any, Any]] = Field(default_factory=list)
    answers: list[Any] = Field(default_factory=list)
    streams: set[str] = Field(default_factory=set)
    generator: Any = None
    ended: bool = False


@dataclass(eq=False, slots=True)
class _AnswerStream:
    request: _RequestSpan
    watched: ref[Any]
    begun: bool = False


class FeedbackHandler(BaseSpanHandler[_RequestSpan]):
    """Span handler that reports each request's outcome and the engine's cached tokens to the orderer.

        llama_index.core.instrumentation.get_dispatcher().add_span_handler(FeedbackHandler())  # once per process

    A request is the span of the query or chat engine. The usage of its only LLM call counts; several calls have no
    numbers. A span that fails without an answer, and a stream that ends before its first token, are discarded; a later
    end counts as served, without numbers.

    Streams need `additional_kwargs={"stream_options": {"include_usage": True}}`; without it the orderer is degraded.
    Finishing waits for no lock: the garbage collector may close a stream. Copies follow no requests yet.
    """

    _streams: dict[str, _AnswerStream] = PrivateAttr(default_factory=dict)
    # Requests that ended before their LLM call, by id, each with the generator that will make the call.
    _pending: dict[str, tuple[_RequestSpan, ref[Any]]] = PrivateAttr(default_factory=dict)
    _sees_events: bool = PrivateAttr(default=False)

    @classmethod
    def class_name(cls) -> str:
        return "FeedbackHandler"

    @property
    def open_answers(self) -> int:
        """Number of requests whose span has ended before their answer."""
        return len({stream.request.id_ for stream in self._streams.values()} | self._pending.keys())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> FeedbackHandler:
        return type(self)()

    def expect(self, ordering: Ordering[Any], orderer: OrdererLike) -> bool:
        span = self._open(active_span_id.get())
        while span is not None and span.retrieves:
            span = self._open(span.parent_id)
        if span is None:
            return False
        span.orderings.append((ordering, orderer))
        return True

    def new_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> _RequestSpan:
        retrieves = isinstance(instance, BaseRetriever | BaseNodePostprocessor)
        return _RequestSpan(id_=id_, parent_id=parent_span_id, retrieves=retrieves)

    def prepare_to_exit_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> _RequestSpan | None:
        if isinstance(result, ChatResponse | CompletionResponse):
            request = self._request_of(id_)
            # A model's method may call that of its base class: both return the same answer.
            if request is not None and not any(result.raw is answer for answer in request.answers):
                request.answers.append(result.raw)
        elif isinstance(result, Generator | AsyncGenerator):
            self._follow(id_, result)
            if (request := self._request_of(id_)) is not None:
                request.generator = ref(result, partial(_forgotten, ref(self), request.id_))
        return self._end(id_, failed=False)

    def prepare_to_drop_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, err: Any = None, **kwargs: Any
    ) -> _RequestSpan | None:
        return self._end(id_, failed=True)

    def hear(self, event: Any) -> None:
        """Spans of streams end before the first token."""
        if isinstance(event, LLMChatStartEvent | LLMCompletionStartEvent):
            self._sees_events = True
            span = self._open(event.span_id)
            if span is not None:
                span.calls_model = True
                span.request = self._reading() if self._pending and self._request_of(event.span_id) is None else None
        elif (stream := self._streams.get(event.span_id or "")) is None:
            return
        elif isinstance(event, LLMChatInProgressEvent | LLMCompletionInProgressEvent):
            stream.begun = True
        elif isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self._finish_stream(event.span_id or "", answer=getattr(event.response, "raw", None))
        elif isinstance(event, ExceptionEvent):
            self._finish_stream(event.span_id or "")

    def _open(self, id: str | None) -> _RequestSpan | None:
        return None if id is None else self.open_spans.get(id)

    def _request_of(self, id: str | None) -> _RequestSpan | None:
        span = self._open(id)
        while span is not None and not span.orderings:
            if span.request is not None:
                request: _RequestSpan = span.request
                return request
            span = self._open(span.parent_id)
        return span

    def _reading(self) -> _RequestSpan | None:
        """Return the ended request whose generator is on the call stack."""
        frames = set()
        frame: FrameType | None = currentframe()
        while frame is not None:
            frames.add(frame)
            frame = frame.f_back
        for request, generator in tuple(self._pending.values()):
            if _frame(generator) in frames:
                return request
        return None

    def _follow(self, id: str, stream: Any) -> None:
        # A stream is an answer only of the outermost LLM call: models call each other, and report an answer twice.
        span, request = self._open(id), self._request_of(id)
        if span is None or request is None or not span.calls_model:
            return
        around = self._open(span.parent_id)
        while around is not None:
            if around.calls_model:
                return
            around = self._open(around.parent_id)
        request.streams.add(id)
        self._streams[id] = _AnswerStream(request, ref(stream, partial(_dropped, ref(self), id)))

    def _finish_stream(self, id: str, *, answer: Any = None) -> None:
        stream = self._streams.pop(id, None)
        if stream is None:
            return
        request = stream.request
        request.streams.discard(id)
        if answer is not None or stream.begun:
            request.answers.append(answer)
        if answer is not None and member(answer, "usage") is None:
            for _, orderer in request.orderings:
                orderer.degrade(_STREAMED_SILENTLY)
        if request.ended and not request.streams:
            self._finish_request(request, failed=not request.answers)

    def _forget(self, id: str) -> None:
        """Finish a request whose generator was dropped."""
        request, _ = self._pending.get(id, (None, None))
        if request is not None and not request.streams:
            self._finish_request(request, failed=self._sees_events and not request.answers)

    def _end(self, id: str, *, failed: bool) -> _RequestSpan | None:
        span = self._open(id)
        if span is None:
            return None
        span.ended = True
        if span.orderings and not failed and not span.streams and _frame(span.generator) is not None:
            self._pending[id] = span, span.generator
        elif failed or not span.streams:
            self._finish_request(span, failed=failed and not span.answers)
        return span

    def _finish_request(self, request: _RequestSpan, *, failed: bool) -> None:
        self._pending.pop(request.id_, None)
        orderings, request.orderings = request.orderings, []
        for ordering, _ in orderings:
            if failed:
                ordering.discard()
            elif len(orderings) == len(request.answers) == 1:
                read_usage(member(request.answers[0], "usage")).confirm(ordering)
            else:
                ordering.confirm()


class _Listener(BaseEventHandler):
    @classmethod
    def class_name(cls) -> str:
        return "FeedbackListener"

    def handle(self, event: Any, **kwargs: Any) -> None:
        for handler in get_dispatcher().span_handlers:
            if isinstance(handler, FeedbackHandler):
                handler.hear(event)


_listener = _Listener()


def hand_over(ordering: Ordering[Any], orderer: OrdererLike) -> None:
    dispatcher = get_dispatcher()
    for handler in dispatcher.span_handlers:
        if isinstance(handler, FeedbackHandler) and handler.expect(ordering, orderer):
            if not any(each is _listener for each in dispatcher.event_handlers):
                dispatcher.add_event_handler(_listener)
            return
    ordering.confirm()


def _dropped(handler: ref[FeedbackHandler], id: str, stream: object) -> None:
    # No event reports a dropped stream.
    if (alive := handler()) is not None:
        alive._finish_stream(id)


def _forgotten(handler: ref[FeedbackHandler], id: str, generator: object) -> None:
    if (alive := handler()) is not None:
        alive._forget(id)


def _frame(generator: ref[Any] | None) -> FrameType | None:
    # None once the generator has ended.
    alive = None if generator is None else generator()
    frame: FrameType | None = getattr(alive, "gi_frame", None) or getattr(alive, "ag_frame", None)
    return frame
