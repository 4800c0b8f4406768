"""Requests of a workflow's generations, from their prompts and ordered documents."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder import Document, Ordering
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest, Question
from ragorder.pipelining import CommittedRequest, Usage
from ragorder.pipelining.workflow import NodeQuestion

__all__ = ["WorkflowPrompts"]


class WorkflowPrompts:
    """`OrderedPrompts` for a `WorkflowServer`: a generation's prompt stands where its question template has {query}.
    All generations share the builder's system prompt, with documents or without."""

    def __init__(self, prompts: OrderedPrompts) -> None:
        self._prompts = prompts

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        asked = _question(question)
        return self._prompts.preview(asked, documents) if question.ordered else self._ranked(asked, documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> CommittedRequest[PromptRequest]:
        asked = _question(question)
        if question.ordered:
            return self._prompts.commit(asked, documents)
        return _Ranked(self._ranked(asked, documents))

    def _ranked(self, question: Question, documents: Sequence[Document]) -> PromptRequest:
        ordering = Ordering(list(documents), list(range(len(documents))))
        return self._prompts.request(question.query, ordering, question.scope, question.all_options())


class _Ranked:
    """In the order of rank: the orderer does not see it."""

    def __init__(self, request: PromptRequest) -> None:
        self.request = request

    def confirm(self, usage: Usage | None, /) -> None:
        pass

    def discard(self) -> None:
        pass


def _question(question: NodeQuestion) -> Question:
    return Question(question.text, question.scope, question.max_tokens, question.temperature, question.options)
