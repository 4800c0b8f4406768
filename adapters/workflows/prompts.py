"""Requests of a workflow's generations, with ordered documents."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing

from ragorder import Document, Ordering
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest, Question
from ragorder.adapters.openai.system_prefix import SystemPrefix
from ragorder.pipelining import CachedLengths, CommittedRequest, Usage
from ragorder.pipelining.workflow import NodeQuestion

__all__ = ["WorkflowPrefix", "WorkflowPrompts"]


class WorkflowPrompts:
    """`OrderedPrompts` for a `WorkflowServer`: a generation's prompt replaces {query} in its question template. All
    generations share the builder's system prompt."""

    def __init__(self, prompts: OrderedPrompts) -> None:
        self._prompts = prompts

    def lengths(self, question: NodeQuestion, documents: Sequence[Document], /) -> Callable[[], CachedLengths] | None:
        """Return None for retrieval order, which the orderer does not track."""
        return self._prompts.lengths(_question(question), documents) if question.ordered or not documents else None

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        asked = _question(question)
        if question.ordered or not documents:
            return self._prompts.preview(asked, documents)
        return self._ranked(asked, documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> CommittedRequest[PromptRequest]:
        asked = _question(question)
        if question.ordered or not documents:
            return self._prompts.commit(asked, documents)
        request = self._ranked(asked, documents)
        self._prompts.note_sent(request)
        return _Ranked(request)

    def _ranked(self, question: Question, documents: Sequence[Document]) -> PromptRequest:
        ordering = Ordering(list(documents), list(range(len(documents))))
        return self._prompts.request(question.query, ordering, question.scope, question.all_options())


class _Ranked:
    """A request in retrieval order, which the orderer does not track."""

    def __init__(self, request: PromptRequest) -> None:
        self.request = request

    def confirm(self, usage: Usage | None, /) -> None:
        pass

    def discard(self) -> None:
        pass


def _question(question: NodeQuestion) -> Question:
    return Question(question.text, question.scope, question.max_tokens, question.temperature, question.options)


class WorkflowPrefix:
    """The system prompt of all generations, for warm-ups: a generation of one token without documents."""

    def __init__(self, prefix: SystemPrefix, prompts: WorkflowPrompts) -> None:
        self._prefix = prefix
        self._prompts = prompts

    def scope(self, question: NodeQuestion, /) -> Hashable:
        return question.scope

    def is_cached(self, question: NodeQuestion, /) -> bool:
        return self._prefix.is_cached(_question(question))

    async def prefill(self, question: NodeQuestion, /) -> None:
        """Raises the engine's errors; cancelling aborts the request."""
        committed = self._prompts.commit(NodeQuestion("", question.scope, max_tokens=1), ())
        usage, began = None, False
        try:
            async with aclosing(self._prefix.engine.stream(committed.request)) as chunks:
                async for chunk in chunks:
                    began = True
                    usage = chunk.usage or usage
        finally:
            if began:
                committed.confirm(usage)
            else:
                committed.discard()
