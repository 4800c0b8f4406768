"""Feedback for LlamaIndex: what the engine reports of a request, told to the orderer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
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

from ragorder.adapters.documents import degrade
from ragorder.orderer_like import OrdererLike
from ragorder.ordering import Ordering

__all__ = ["FeedbackHandler", "finish"]

_STREAMED_SILENTLY = (
    "answers are streamed without usage, and what the engine reports of its cache is lost: give the LLM "
    'additional_kwargs={"stream_options": {"include_usage": True}}'
)


class _Span(BaseSpan):
    """A span that is open, or whose answer is still to come.

    `retrieves`: it brings documents, and asks no question on them. `asks`: it is a call of a model, `request` that for
    which it was made if this has ended. `orderings` are those made in it, each with its orderer; `answers` what the
    calls that ended gave back, `streams` the spans of those whose answers are being streamed. `generator` is what it
    has handed out last: a model may be asked as late as this is read. `ended`: whether it is open no more.
    """

    retrieves: bool = False
    asks: bool = False
    request: Any = None
    orderings: list[tuple[Any, Any]] = Field(default_factory=list)
    answers: list[Any] = Field(default_factory=list)
    streams: set[str] = Field(default_factory=set)
    generator: Any = None
    ended: bool = False


@dataclass(eq=False, slots=True)
class _Stream:
    """An answer that is being streamed to a request. `begun`: its first token is there, so its prompt was computed."""

    request: _Span
    watched: ref[Any]
    begun: bool = False


class FeedbackHandler(BaseSpanHandler[_Span]):
    """Tells the orderer how each request ended, and how many tokens the engine reports as cached.

    `llama_index.core.instrumentation.get_dispatcher().add_span_handler(FeedbackHandler())`, once, serves all adapters
    in the process. A request is the span that asked for the documents: a query engine's or a chat engine's. If it asked
    the model once, the numbers of that answer count, if the server reports them (vLLM: --enable-prompt-tokens-details).
    If it asked several times (documents that do not fit into one prompt) there are no numbers. If the span fails
    without any answer, it is discarded.

    A request whose answer is streamed ends with its stream, at the end of which the usage stands if the model asks for
    it: `additional_kwargs={"stream_options": {"include_usage": True}}` with OpenAI-like models. An orderer whose
    answers are streamed without it is degraded. A stream that broke, or was closed, after its first token counts as
    served, without numbers; before it, as discarded.

    No lock is waited for while an ordering is finished: the garbage collector may close a stream. A copy, deep or
    pickled, follows no requests yet.
    """

    _streams: dict[str, _Stream] = PrivateAttr(default_factory=dict)
    # Requests that ended before their model was asked, by their ids, each with the generator that will ask it.
    _unasked: dict[str, tuple[_Span, ref[Any]]] = PrivateAttr(default_factory=dict)
    _heard: bool = PrivateAttr(default=False)

    @classmethod
    def class_name(cls) -> str:
        return "FeedbackHandler"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> FeedbackHandler:
        return type(self)()

    def expect(self, ordering: Ordering[Any], orderer: OrdererLike) -> bool:
        """Have the ordering finished by the request that is under way. False if there is none."""
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
    ) -> _Span:
        retrieves = isinstance(instance, BaseRetriever | BaseNodePostprocessor)
        return _Span(id_=id_, parent_id=parent_span_id, retrieves=retrieves)

    def prepare_to_exit_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> _Span | None:
        if isinstance(result, ChatResponse | CompletionResponse):
            request = self._request_of(id_)
            # A model's class may call that of its base: both give the same answer back.
            if request is not None and not any(result.raw is answer for answer in request.answers):
                request.answers.append(result.raw)
        elif isinstance(result, Generator | AsyncGenerator):
            self._follow(id_, result)
            if (request := self._request_of(id_)) is not None:
                request.generator = ref(result, partial(_forgotten, ref(self), request.id_))
        return self._end(id_, failed=False)

    def prepare_to_drop_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, err: Any = None, **kwargs: Any
    ) -> _Span | None:
        return self._end(id_, failed=True)

    def hear(self, event: Any) -> None:
        """An event of a model, which tells of streams what spans do not: these end before the first token."""
        if isinstance(event, LLMChatStartEvent | LLMCompletionStartEvent):
            self._heard = True
            span = self._open(event.span_id)
            if span is not None:
                span.asks = True
                span.request = self._reading() if self._unasked and self._request_of(event.span_id) is None else None
        elif (stream := self._streams.get(event.span_id or "")) is None:
            return
        elif isinstance(event, LLMChatInProgressEvent | LLMCompletionInProgressEvent):
            stream.begun = True
        elif isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self._finish(event.span_id or "", answer=getattr(event.response, "raw", None))
        elif isinstance(event, ExceptionEvent):
            self._finish(event.span_id or "")

    def _open(self, id: str | None) -> _Span | None:
        return None if id is None else self.open_spans.get(id)

    def _request_of(self, id: str | None) -> _Span | None:
        """The nearest span around one, or this itself, in which documents were put in order."""
        span = self._open(id)
        while span is not None and not span.orderings:
            if span.request is not None:
                request: _Span = span.request
                return request
            span = self._open(span.parent_id)
        return span

    def _reading(self) -> _Span | None:
        """The request whose generator is being read right here: it has ended, and no open span leads to it."""
        frames = set()
        frame: FrameType | None = currentframe()
        while frame is not None:
            frames.add(frame)
            frame = frame.f_back
        for request, generator in tuple(self._unasked.values()):
            if _frame(generator) in frames:
                return request
        return None

    def _follow(self, id: str, stream: Any) -> None:
        """A span gave a stream back. It is an answer if a model was asked in it, and not in one around it: models call
        each other, and tell of the same answer twice."""
        span, request = self._open(id), self._request_of(id)
        if span is None or request is None or not span.asks:
            return
        around = self._open(span.parent_id)
        while around is not None:
            if around.asks:
                return
            around = self._open(around.parent_id)
        request.streams.add(id)
        self._streams[id] = _Stream(request, ref(stream, partial(_dropped, ref(self), id)))

    def _finish(self, id: str, *, answer: Any = None) -> None:
        """A stream ended, with this answer (None: without its end, or without anything reported)."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return
        request = stream.request
        request.streams.discard(id)
        if answer is not None or stream.begun:
            request.answers.append(answer)
        if answer is not None and _get(answer, "usage") is None:
            for _, orderer in request.orderings:
                degrade(orderer, _STREAMED_SILENTLY)
        if request.ended and not request.streams:
            self._finish_ordering(request, failed=not request.answers)

    def _forget(self, id: str) -> None:
        """A generator was forgotten: if no model was asked by it, none will be. Where models tell nothing, one was."""
        request, _ = self._unasked.get(id, (None, None))
        if request is not None and not request.streams:
            self._finish_ordering(request, failed=self._heard and not request.answers)

    def _end(self, id: str, *, failed: bool) -> _Span | None:
        span = self._open(id)
        if span is None:
            return None
        span.ended = True
        if span.orderings and not failed and not span.streams and _frame(span.generator) is not None:
            self._unasked[id] = span, span.generator
        elif failed or not span.streams:
            self._finish_ordering(span, failed=failed and not span.answers)
        return span

    def _finish_ordering(self, request: _Span, *, failed: bool) -> None:
        self._unasked.pop(request.id_, None)
        orderings, request.orderings = request.orderings, []
        for ordering, _ in orderings:
            if failed:
                ordering.discard()
            elif len(orderings) == len(request.answers) == 1:
                _confirm(ordering, _get(request.answers[0], "usage"))
            else:
                ordering.confirm()


class _Listener(BaseEventHandler):
    """Passes the events of models on to the feedback handlers, which users add as handlers of spans."""

    @classmethod
    def class_name(cls) -> str:
        return "FeedbackListener"

    def handle(self, event: Any, **kwargs: Any) -> None:
        for handler in get_dispatcher().span_handlers:
            if isinstance(handler, FeedbackHandler):
                handler.hear(event)


_listener = _Listener()


def finish(ordering: Ordering[Any], orderer: OrdererLike) -> None:
    """Leave the ordering to the feedback, or count it as served if there is none."""
    dispatcher = get_dispatcher()
    for handler in dispatcher.span_handlers:
        if isinstance(handler, FeedbackHandler) and handler.expect(ordering, orderer):
            if not any(each is _listener for each in dispatcher.event_handlers):
                dispatcher.add_event_handler(_listener)
            return
    ordering.confirm()


def _dropped(handler: ref[FeedbackHandler], id: str, stream: object) -> None:
    """A stream was dropped, perhaps before anything was read of it: no event tells of that."""
    if (alive := handler()) is not None:
        alive._finish(id)


def _forgotten(handler: ref[FeedbackHandler], id: str, generator: object) -> None:
    """The same of what a request handed out."""
    if (alive := handler()) is not None:
        alive._forget(id)


def _confirm(ordering: Ordering[Any], usage: Any) -> None:
    cached = _get(_get(usage, "prompt_tokens_details"), "cached_tokens")
    ordering.confirm(cached, _get(usage, "total_tokens"), prompt_tokens=_get(usage, "prompt_tokens"))


def _frame(generator: ref[Any] | None) -> FrameType | None:
    """Where a generator stands; None once it has ended."""
    alive = None if generator is None else generator()
    frame: FrameType | None = getattr(alive, "gi_frame", None) or getattr(alive, "ag_frame", None)
    return frame


def _get(value: Any, name: str) -> Any:
    """What models give back is an object or a dictionary."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
