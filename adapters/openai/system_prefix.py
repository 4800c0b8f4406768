"""The system prompt on an engine: whether it is there, and how it gets there (RAGCache++ section 3.6)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing
from typing import Any

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.prompts import PromptForm, PromptRequest, Question, checked_form, finish
from ragorder.orderer import OrdererLike
from ragorder.pipelining import AnswerChunk, StreamingEngine, Usage

__all__ = ["SystemPrefix", "WatchedEngine"]

# What a chat template may look at, and what decides who answers; all else is of no use to a warm-up.
_TEMPLATE = ("tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_ROUTE = ("cache_salt", "extra_headers", "extra_query", "timeout", "user")
_MAX_SCOPES = 4096


class WatchedEngine:
    """An engine, with an eye on what becomes of its requests, `running` of which have not ended."""

    def __init__(self, engine: StreamingEngine[PromptRequest]) -> None:
        self.running = 0
        self._engine = engine
        self._answered: set[Hashable] | None = None

    def trusted(self, scope: Hashable) -> bool:
        """Whether the engine answered a request of this scope since it was last lost. One that was lost may have been
        started anew, and hold nothing."""
        return self._answered is None or scope in self._answered

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """The engine's stream."""
        self.running += 1
        began = False
        try:
            async with aclosing(self._engine.stream(request)) as chunks:
                async for chunk in chunks:
                    if not began:
                        began = True
                        self._note_answer(request.scope)
                    yield chunk
        except Exception as error:
            if _is_loss(error):
                self._answered = set()
            raise
        finally:
            self.running -= 1

    def _note_answer(self, scope: Hashable) -> None:
        if self._answered is not None:
            if len(self._answered) >= _MAX_SCOPES:
                # Forgetting one costs a warm-up.
                self._answered.clear()
            self._answered.add(scope)


class SystemPrefix:
    """What stands in front of the documents, one for each scope. The orderer knows whether the engine holds it, from
    the engine's KV events if it follows them; after a failure of the engine nobody does until it has answered.

    A prefill is a request of one token, and an ordering without documents: other requests count on it at once. Whatever
    becomes of it, the ordering is finished. Give `engine` to the pipeline, so that failures there are noticed here.

    Raises ValueError for `prompts` that cannot be.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder,
        engine: StreamingEngine[PromptRequest],
        prompts: PromptForm = "messages",
    ) -> None:
        self.engine = engine if isinstance(engine, WatchedEngine) else WatchedEngine(engine)
        self._orderer = orderer
        self._builder = builder
        self._form = checked_form(prompts, builder)

    def scope(self, question: Question, /) -> Hashable:
        return question.scope

    def is_cached(self, question: Question, /) -> bool:
        """True also for one that is shorter than a block, of which nothing can be held."""
        if self._builder.prefix_tokens < self._orderer.settings.block_size:
            return True
        return self._orderer.holds_prefix(scope=question.scope) and self.engine.trusted(question.scope)

    async def prefill(self, question: Question, /) -> None:
        """Have the engine compute it. Raises what the engine raises; cancelling aborts the request."""
        request = self._request(question)
        ordering: Ordering[Document] = self._orderer.order([], scope=question.scope, suffix_tokens=0)
        ordered_s = time.perf_counter()
        usage: Usage | None = None
        began = False
        try:
            async with aclosing(self.engine.stream(request)) as chunks:
                async for chunk in chunks:
                    began = True
                    usage = chunk.usage or usage
        finally:
            if began:
                finish(ordering, usage, ordered_s)
            else:
                ordering.discard()

    def _request(self, question: Question) -> PromptRequest:
        options = _shaping(question.options)
        if body := question.options.get("extra_body"):
            options["extra_body"] = _shaping(body)
        options |= {"max_tokens": 1, "temperature": 0.0}
        if self._form == "token_ids":
            ids = self._builder.prefix_ids
            return PromptRequest(None, ids, question.scope, options, len(ids))
        messages = self._builder.build("", ()).messages
        return PromptRequest(messages, None, question.scope, options, self._builder.prefix_tokens)


def _shaping(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _TEMPLATE + _ROUTE}


def _is_loss(error: Exception) -> bool:
    """Whether it may be that the engine is no longer the one that it was: not so if it refuses a request."""
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and status < 500
    return not (refused or isinstance(error, (ValueError, TypeError)))
