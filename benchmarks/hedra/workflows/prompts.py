"""Prompts with documents in the order of their rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.document import Document
from ragorder.pipelining import CommittedRequest
from ragorder.pipelining.workflow import NodeQuestion

__all__ = ["RankedPrompts"]


@dataclass(frozen=True, slots=True)
class RankedPrompts:
    """What a system without ordering sends."""

    prompts: WorkflowPrompts

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        return self.prompts.preview(replace(question, ordered=False), documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> CommittedRequest[PromptRequest]:
        return self.prompts.commit(replace(question, ordered=False), documents)
