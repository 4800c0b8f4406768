"""Requests built from questions and their ordered documents."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.usage import AnswerLength
from ragorder.common.counts import estimate_tokens, reported_count
from ragorder.pipelining import CachedLengths, Usage
from ragorder.protocols import OrdererLike
from ragorder.scope.request import Lengths

__all__ = [
    "OrderedPrompts",
    "PromptForm",
    "PromptRequest",
    "Question",
    "TimedUsage",
    "checked_form",
    "finish",
    "predict_lengths",
]

PromptForm = Literal["messages", "token_ids"]


@dataclass(frozen=True, slots=True)
class Question:
    """`options`: more options of the client's create() or vLLM's SamplingParams. `streamed`: the answer is read as it
    is generated."""

    query: str
    scope: Hashable = None
    max_tokens: int | None = 256
    temperature: float | None = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    streamed: bool = field(default=True, compare=False)

    def all_options(self) -> dict[str, Any]:
        return dict(self.options) | {"max_tokens": self.max_tokens, "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A chat's messages, or a prompt's tokens.

    Without a tokenizer `prompt_tokens` is estimated, and `document_ends` (in tokens) is empty. `keep_question`: a
    warm-up of system prompt and question. `extra_body`: for a cloud's breakpoints.
    """

    messages: Sequence[Mapping[str, Any]] | None = field(repr=False)
    token_ids: Sequence[int] | None = field(repr=False)
    scope: Hashable = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    prompt_tokens: int | None = field(default=None, compare=False)
    document_ends: Sequence[int] = field(default=(), repr=False, compare=False)
    expected_uses: Sequence[float] = field(default=(), repr=False, compare=False)
    prefix_tokens: int = field(default=0, repr=False, compare=False)
    # Compared, because a speculation with another number computes other KV.
    exact_documents: int = field(default=0, repr=False)
    keep_question: bool = field(default=False, repr=False, compare=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    streamed: bool = field(default=True, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TimedUsage(Usage):
    """Usage of a request, and when it was sent (`time.perf_counter`)."""

    sent_s: float | None = None


def finish(ordering: Ordering[Document], usage: Usage | None, ordered_s: float) -> None:
    """Confirm an ordering made at `ordered_s` (`time.perf_counter`) with the reported usage."""
    if usage is None:
        ordering.confirm()
        return
    counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    prompt, completion, cached = map(reported_count, counts)
    sent_s = getattr(usage, "sent_s", None)
    if cached is not None and sent_s is not None and sent_s < ordered_s and cached < ordering.cached_tokens:
        # A speculation was sent before its request was ordered. Its report lacks tokens cached in between, and the
        # orderer would take these, and everything older, for evicted.
        cached = None
    total = None if prompt is None or completion is None else prompt + completion
    ordering.confirm(cached, total, prompt_tokens=prompt)


def predict_lengths(
    orderer: OrdererLike, documents: Sequence[Document], scope: Hashable, question_tokens: int
) -> CachedLengths:
    cached_tokens, documents_end = orderer.predict_cached_tokens(documents, scope=scope)
    computed_tokens = documents_end + question_tokens - cached_tokens
    return CachedLengths(cached_tokens, computed_tokens, orderer.settings.prefix_tokens)


class OrderedPrompts:
    """Makes requests whose documents are ordered for the engine's prefix cache.

        pipeline = Pipeline(retrieval, OrderedPrompts(orderer, builder), engine)

    `prompts`: "messages" for a server's chat template, or "token_ids" as `builder` makes them. `learn` gets each
    committed request's prompt tokens. `waiting` returns the documents of each request that waits in a question's scope.
    Raises ValueError for invalid `prompts`.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder,
        prompts: PromptForm = "messages",
        *,
        learn: Callable[[int], None] | None = None,
        waiting: Callable[[Question], Sequence[Iterable[Document]]] = lambda question: (),
    ) -> None:
        self.answer_length = AnswerLength()
        self._orderer = orderer
        self._builder = builder
        self._form = checked_form(prompts, builder)
        self._learn = learn
        self._waiting = waiting

    def order(
        self,
        query: str,
        documents: Sequence[Document],
        scope: Hashable,
        options: Mapping[str, Any],
        waiting: Sequence[Iterable[Document]] = (),
    ) -> Ordering[Document]:
        suffix_tokens = self.suffix_tokens(query, options)
        return self._orderer.order(documents, scope=scope, waiting=waiting, lengths=Lengths(suffix=suffix_tokens))

    def suffix_tokens(self, query: str, options: Mapping[str, Any]) -> int:
        limit = options.get("max_completion_tokens")
        limit = options.get("max_tokens") if limit is None else limit
        limit = limit if isinstance(limit, int) and limit >= 0 else sys.maxsize
        question_tokens = self._builder.suffix_tokens(query)
        return self.answer_length.suffix_tokens(question_tokens, limit, self._orderer.settings.suffix_tokens)

    def request(
        self, query: str, ordering: Ordering[Document], scope: Hashable, options: Mapping[str, Any]
    ) -> PromptRequest:
        prompt = self._builder.build(query, ordering)
        length = estimate_tokens(prompt.text) if prompt.token_ids is None else len(prompt.token_ids)
        messages: Sequence[Mapping[str, Any]] | None
        messages, token_ids = (prompt.messages, None) if self._form == "messages" else (None, prompt.token_ids)
        extra_body: dict[str, Any] = {}
        if ordering.cloud is not None and messages is not None:
            extra_body = prompt.openai()
            messages = extra_body.pop("messages")
        ends = tuple(span.end for span in prompt.spans)
        # For messages the server itself finds where the prefix ends, in its own tokens.
        prefix_tokens = 0 if token_ids is None else self._builder.prefix_tokens
        return PromptRequest(
            messages,
            token_ids,
            scope,
            options,
            length,
            ends,
            ordering.expected_uses,
            prefix_tokens,
            ordering.exact_documents,
            extra_body=extra_body,
        )

    def lengths(self, question: Question, documents: Sequence[Document], /) -> Callable[[], CachedLengths]:
        return partial(
            predict_lengths, self._orderer, documents, question.scope, self._builder.suffix_tokens(question.query)
        )

    def preview(self, question: Question, documents: Sequence[Document], /) -> PromptRequest:
        ordered = self._orderer.preview(documents, waiting=self._waiting(question), scope=question.scope)
        return self._of(question, Ordering(ordered, _permutation(documents, ordered)))

    def commit(self, question: Question, documents: Sequence[Document], /) -> _CommittedRequest:
        """Order documents and return their request, to be sent at once."""
        options, waiting = question.all_options(), self._waiting(question)
        ordering = self.order(question.query, documents, question.scope, options, waiting)
        try:
            request = self._of(question, ordering)
            self.note_sent(request)
        except BaseException:
            ordering.discard()
            raise
        return _CommittedRequest(request, ordering, self.answer_length)

    def note_sent(self, request: PromptRequest) -> None:
        if self._learn is not None and request.prompt_tokens is not None:
            self._learn(request.prompt_tokens)

    def _of(self, question: Question, ordering: Ordering[Document]) -> PromptRequest:
        request = self.request(question.query, ordering, question.scope, question.all_options())
        return replace(request, streamed=question.streamed)


class _CommittedRequest:
    def __init__(self, request: PromptRequest, ordering: Ordering[Document], answer_length: AnswerLength) -> None:
        self.request = request
        self._ordering = ordering
        self._answer_length = answer_length
        self._ordered_s = time.perf_counter()

    def confirm(self, usage: Usage | None, /) -> None:
        finish(self._ordering, usage, self._ordered_s)
        if usage is not None:
            self._answer_length.learn(usage.completion_tokens)

    def discard(self) -> None:
        self._ordering.discard()


def checked_form(prompts: PromptForm, builder: PromptBuilder) -> PromptForm:
    if prompts not in ("messages", "token_ids"):
        raise ValueError(f"prompts is {prompts!r}: give 'messages' or 'token_ids'")
    if prompts == "token_ids" and builder.build("", ()).token_ids is None:
        raise ValueError("prompts='token_ids' needs the served model's tokenizer: PromptBuilder(tokenizer=…)")
    return prompts


def _permutation(given: Sequence[Document], ordered: Sequence[Document]) -> list[int]:
    # A builder with `state_ranking` writes the ranks into the prompt.
    ranks: defaultdict[int, deque[int]] = defaultdict(deque)
    for rank, document in enumerate(given):
        ranks[id(document)].append(rank)
    return [ranks[id(document)].popleft() for document in ordered]
