"""Policies: the order of a request's documents, and where its marks stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.clouds import CacheRules, PromptParts, read_cloud_usage

__all__ = ["POLICIES", "CloudPolicy"]


class CloudPolicy(ABC):
    """Makes the bodies of requests. `clock()` is in seconds; `suffix_tokens` are those of a question."""

    def __init__(
        self, rules: CacheRules, builder: PromptBuilder, clock: Callable[[], float], suffix_tokens: int
    ) -> None:
        self.rules = rules
        self.builder = builder
        self.additive = rules.usage is not None and rules.usage.additive

    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        """In retrieval order."""
        return Ordering(list(documents), range(len(documents)))

    def predicted(self, ordering: Ordering[Document]) -> int:
        return -1

    @abstractmethod
    def body(self, query: str, ordering: Ordering[Document]) -> dict[str, Any]: ...

    def confirm(self, ordering: Ordering[Document], usage: Mapping[str, Any]) -> None:
        read = read_cloud_usage(usage, self.rules)
        ordering.confirm(read.cached_tokens, prompt_tokens=read.prompt_tokens, written_tokens=read.written_tokens)


class FixedMarks(CloudPolicy):
    def body(self, query: str, ordering: Ordering[Document]) -> dict[str, Any]:
        plain, marks = self.builder.build(query, ordering).parts, self.marks(len(ordering.documents))
        parts = PromptParts(
            plain.system, plain.documents, plain.question, marks or (), self.rules.ttl, explicit=marks is not None
        )
        if not self.additive:
            return parts.openai()
        body = parts.anthropic()
        return body if marks is not None else body | {"cache_control": {"type": "ephemeral"}}

    @abstractmethod
    def marks(self, documents: int) -> Sequence[int] | None:
        """None: the provider sets one by itself, behind the question."""


class Automatic(FixedMarks):
    def marks(self, documents: int) -> Sequence[int] | None:
        return None


class SystemPrompt(FixedMarks):
    """ContextPilot 0.5.0's adapters mark the system prompt, and no document in a user's message."""

    def marks(self, documents: int) -> Sequence[int] | None:
        return [0]


class End(FixedMarks):
    def marks(self, documents: int) -> Sequence[int] | None:
        return [0, documents]


class Spread(FixedMarks):
    """Four, evenly."""

    def marks(self, documents: int) -> Sequence[int] | None:
        return sorted({0, -(-documents // 3), -(-2 * documents // 3), documents})


class SortedSpread(Spread):
    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        permutation = sorted(range(len(documents)), key=lambda rank: documents[rank].id)
        return Ordering([documents[rank] for rank in permutation], permutation)


class EngineOrder(Spread):
    """Ordered as for an engine that resumes anywhere and forgets nothing."""

    def __init__(
        self, rules: CacheRules, builder: PromptBuilder, clock: Callable[[], float], suffix_tokens: int
    ) -> None:
        super().__init__(rules, builder, clock, suffix_tokens)
        self._orderer = Orderer(
            capacity_tokens=None,
            block_size=1,
            tokens=builder.document_tokens,
            prefix_tokens=builder.prefix_tokens,
            suffix_tokens=suffix_tokens,
            strict=True,
        )

    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        return self._orderer.order(documents)

    def confirm(self, ordering: Ordering[Document], usage: Mapping[str, Any]) -> None:
        # What a cloud has not found an engine would have.
        ordering.confirm()


class EngineOrderEnd(EngineOrder):
    def marks(self, documents: int) -> Sequence[int] | None:
        return [0, documents]


class ForCloud(CloudPolicy):
    """`Orderer.for_cloud`."""

    def __init__(
        self, rules: CacheRules, builder: PromptBuilder, clock: Callable[[], float], suffix_tokens: int
    ) -> None:
        super().__init__(rules, builder, clock, suffix_tokens)
        self._orderer = Orderer.for_cloud(
            rules=rules, builder=builder, clock=clock, suffix_tokens=suffix_tokens, strict=True
        )

    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        return self._orderer.order(documents)

    def predicted(self, ordering: Ordering[Document]) -> int:
        return ordering.cached_tokens

    def body(self, query: str, ordering: Ordering[Document]) -> dict[str, Any]:
        prompt = self.builder.build(query, ordering)
        # Parts, which the simulated cloud tells apart where a provider finds tokens.
        return prompt.anthropic() if self.additive else prompt.parts.openai()


POLICIES: Mapping[str, type[CloudPolicy]] = {
    "automatic": Automatic,
    "system prompt": SystemPrompt,
    "end": End,
    "sorted by id, four": SortedSpread,
    "engine order, end": EngineOrderEnd,
    "engine order, four": EngineOrder,
    "ragorder": ForCloud,
}
