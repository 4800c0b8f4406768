"""Warm-up of the system prompt on an engine (RAGCache++ section 3.6)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing
from typing import Any

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.prompts import PromptForm, PromptRequest, Question, checked_form, finish
from ragorder.orderer import Lengths, OrdererLike
from ragorder.pipelining import AnswerChunk, StreamingEngine, Usage

__all__ = ["SystemPrefix", "WatchedEngine"]

# Options that a chat template may read, or that route the request: a warm-up needs no others.
_TEMPLATE = ("tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_ROUTE = ("cache_salt", "extra_headers", "extra_query", "timeout", "user")
_MAX_SCOPES = 4096


class WatchedEngine:
    def __init__(self, engine: StreamingEngine[PromptRequest]) -> None:
        self.running = 0
        self._engine = engine
        self._answered: set[Hashable] | None = None

    def trusted(self, scope: Hashable) -> bool:
        """Return False after a failure, which may be a restart, until an answer in this scope."""
        return self._answered is None or scope in self._answered

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
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
                # A removed scope costs one warm-up.
                self._answered.clear()
            self._answered.add(scope)


class SystemPrefix:
    """Prompt prefix before the documents, one per scope. A prefill is a request of one token and an ordering without
    documents.

        prefix = SystemPrefix(orderer, builder, engine)
        pipeline = Pipeline(retrieval, prompts, prefix.engine, warm_up=WarmUp(prefix))

    With `reuse="fused"` each question is prefilled after the prefix: the embedded engine selects tokens by it. After a
    failure of its `engine`, prefixes count as evicted. Raises ValueError for invalid `prompts`.
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
        self._asks = orderer.settings.reuse == "fused" and len(builder.prefix_ids) > 0

    def scope(self, question: Question, /) -> Hashable:
        return (question.scope, question.query) if self._asks else question.scope

    def is_cached(self, question: Question, /) -> bool:
        """True for a prefix shorter than a block, which is never cached."""
        if self._asks:
            return False
        if self._builder.prefix_tokens < self._orderer.settings.block_size:
            return True
        return self._orderer.holds_prefix(scope=question.scope) and self.engine.trusted(question.scope)

    async def prefill(self, question: Question, /) -> None:
        """Raises the engine's errors; cancelling aborts the request."""
        request = self._request(question)
        lengths = Lengths(suffix=(request.prompt_tokens or 0) - self._builder.prefix_tokens)
        ordering: Ordering[Document] = self._orderer.order([], scope=question.scope, lengths=lengths)
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
        builder, query = self._builder, question.query if self._asks else ""
        prompt, front = builder.build(query, ()), builder.prefix_tokens
        length = front + builder.suffix_tokens(query)
        # The system prompt is its own node on the embedded engine: no node has a prompt's last token.
        ends = (front,) if prompt.token_ids is not None else ()
        if self._form == "token_ids":
            messages, token_ids, prefix_tokens = None, prompt.token_ids, front
        else:
            messages, token_ids, prefix_tokens = prompt.messages, None, 0
        return PromptRequest(
            messages, token_ids, question.scope, options, length, ends, (), prefix_tokens, keep_question=self._asks
        )


def _shaping(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _TEMPLATE + _ROUTE}


def _is_loss(error: Exception) -> bool:
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and status < 500
    return not (refused or isinstance(error, (ValueError, TypeError)))
