"""Prompts of requests as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.prompt import Prompt, PromptBuilder

SYSTEM_PROMPT = (
    "You are a careful assistant. Answer the question from the documents below and from nothing else. "
    "If they do not hold the answer, say that they do not. Name the documents that you used."
)


class PromptIds(list[int]):
    """A prompt's token ids, with the ends of its system prompt and documents for engines that cache documents."""

    def __init__(self, token_ids: Iterable[int], document_ends: Iterable[int] = ()) -> None:
        super().__init__(token_ids)
        # What is empty ends where the one before it does.
        self.document_ends = tuple(sorted(set(document_ends) - {0}))

    @classmethod
    def of(cls, prompt: Prompt) -> PromptIds:
        assert prompt.token_ids is not None, "the evaluation's prompt builder has a tokenizer"
        starts = [span.start for span in prompt.spans[:1]]
        return cls(prompt.token_ids, [*starts, *(span.end for span in prompt.spans)])


class Prompts(Protocol):
    """Builder of prompts. Lengths in tokens; `number` is the request's place in the trace."""

    prefix_tokens: int

    def document_tokens(self, document: Document) -> int: ...

    def suffix_tokens(self, request: TraceRequest) -> int:
        """The length of the question, without the answer."""

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> Sequence[int]:
        """The prompt with its documents in this order."""


class NumberedPrompts:
    """Prompts without a model: distinct runs of token ids. The system prompt has 64 tokens, the question 20."""

    prefix_tokens = 64
    question_tokens = 20

    def __init__(self) -> None:
        self._system = array("q", range(-self.prefix_tokens, 0))
        self._document_ids: dict[str, array[int]] = {}
        self._next_id = 0

    document_tokens = staticmethod(attrgetter("token_count"))

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self.question_tokens

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> array[int]:
        ids = self._system[:]
        for document in documents:
            ids += self._ids(document)
        first = -1_000_000_000 - number * self.question_tokens
        ids.extend(range(first, first + self.question_tokens))
        return ids

    def _ids(self, document: Document) -> array[int]:
        ids = self._document_ids.get(document.key)
        if ids is None:
            ids = array("q", range(self._next_id, self._next_id + document.token_count))
            self._document_ids[document.key] = ids
            self._next_id += document.token_count
        return ids


class BuiltPrompts:
    """Prompts of a `builder`, in the served model's tokens."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.builder = builder
        self.prefix_tokens = builder.prefix_tokens

    def document_tokens(self, document: Document) -> int:
        return self.builder.document_tokens(document)

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self.builder.suffix_tokens(request.question)

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> PromptIds:
        return PromptIds.of(self.builder.build(request.question, documents))
