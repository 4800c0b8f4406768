"""Prompts with documents in the order of their rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.document import Document
from ragorder.pipelining import Usage
from ragorder.pipelining.workflow import NodeQuestion
from ragorder.prompt import PromptBuilder

__all__ = ["RankedPrompts"]


@dataclass(frozen=True, slots=True)
class _Sent:
    request: PromptRequest

    def confirm(self, usage: Usage | None, /) -> None: ...

    def discard(self) -> None: ...


class RankedPrompts:
    """What a system without ordering sends: a `RequestBuilder` of token ids."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        prompt = self._builder.build(question.text, documents)
        assert prompt.token_ids is not None, "the builder has a tokenizer"
        ends = tuple(span.end for span in prompt.spans)
        options = dict(question.options) | {"max_tokens": question.max_tokens, "temperature": question.temperature}
        return PromptRequest(None, prompt.token_ids, question.scope, options, len(prompt.token_ids), ends)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> _Sent:
        return _Sent(self.preview(question, documents))
