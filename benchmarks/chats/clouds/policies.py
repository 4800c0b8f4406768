"""Requests and conversations as a policy sends them to a cloud."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from ragorder import Document, Orderer, Ordering, PromptBuilder, Turn
from ragorder.clouds import CacheRules, PromptParts, anthropic_content, openai_content, read_cloud_usage
from ragorder.eval.running.cells import SuiteCell


class CloudsCell(SuiteCell):
    """Requests of a workload to `model` of `provider`, each `gap_s` after the one before on average, at random times.

    A prompt is a system prompt, documents and a question of the given tokens; the answer's first token comes after
    `first_token_s`, its last one after `answer_s`. The workload "conversations" has conversations of `turns` turns,
    whose next question comes `pause_s` after an answer on average.
    """

    workload: str
    provider: Literal["anthropic", "bedrock", "deepseek", "openai"] = "anthropic"
    model: str = "claude-opus-5"
    ttl: str | None = None
    gap_s: float = Field(2.0, gt=0)
    requests: int = Field(1500, ge=1)
    system_tokens: int = Field(600, ge=1)
    document_tokens: int = Field(600, ge=16)
    question_tokens: int = Field(60, ge=16)
    first_token_s: float = Field(1.0, ge=0)
    answer_s: float = Field(5.0, ge=0)
    turns: int = Field(6, ge=1)
    pause_s: float = Field(60.0, gt=0)

    @property
    def converses(self) -> bool:
        return self.workload == "conversations"


_CHARACTERS = 4
_ROLES = ("user", "assistant")
_AUTOMATIC: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}


def make_builder(cell: CloudsCell) -> PromptBuilder:
    """The system prompt and the blank line after it have the cell's tokens."""
    return PromptBuilder("s" * (_CHARACTERS * cell.system_tokens - 2))


def make_document(number: int, tokens: int) -> Document:
    """A text that takes `tokens` with its header and the blank line after it."""
    id = f"d{number:06}"
    length = _CHARACTERS * tokens - len(f"[{id}]\n\n\n")
    return Document(id, (f"{number} " * length)[:length].replace(" ", "-"))


def make_question(number: int, tokens: int) -> str:
    length = _CHARACTERS * tokens - len("Question: ")
    return f"{number:06}".ljust(length, "?")[:length]


def make_text(number: int, tokens: int) -> str:
    return f"{number:06}".ljust(_CHARACTERS * tokens, ".")


Marks = Callable[[int], Sequence[int]]
"""The places of marks, by the number of documents."""


class CloudPolicy:
    """Makes the bodies of requests: documents in retrieval order, and `marks` (None: the provider sets one by itself,
    after the question). `clock()` is in seconds; `suffix_tokens` are those of a question."""

    def __init__(
        self,
        rules: CacheRules,
        builder: PromptBuilder,
        clock: Callable[[], float],
        suffix_tokens: int,
        marks: Marks | None = None,
    ) -> None:
        self.rules = rules
        self.builder = builder
        self.additive = rules.usage is not None and rules.usage.additive
        self._marks = marks
        self._orderer = self.orderer(clock, suffix_tokens)

    def orderer(self, clock: Callable[[], float], suffix_tokens: int) -> Orderer | None:
        return None

    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        if self._orderer is not None:
            return self._orderer.order(documents)
        return Ordering(list(documents), range(len(documents)))

    def predicted(self, ordering: Ordering[Document]) -> int:
        return -1

    def body(self, query: str, ordering: Ordering[Document]) -> dict[str, Any]:
        plain = self.builder.build(query, ordering).parts
        marks = () if self._marks is None else self._marks(len(ordering.documents))
        explicit = self._marks is not None
        parts = PromptParts(plain.system, plain.documents, plain.question, marks, self.rules.ttl, explicit=explicit)
        if not self.additive:
            return parts.openai()
        return parts.anthropic() | ({} if explicit else _AUTOMATIC)

    def confirm(self, ordering: Ordering[Document], usage: Mapping[str, Any]) -> None:
        read = read_cloud_usage(usage, self.rules)
        ordering.confirm(read.cached_tokens, prompt_tokens=read.prompt_tokens, written_tokens=read.written_tokens)


class SortedById(CloudPolicy):
    def ordering(self, documents: Sequence[Document]) -> Ordering[Document]:
        permutation = sorted(range(len(documents)), key=lambda rank: documents[rank].id)
        return Ordering([documents[rank] for rank in permutation], permutation)


class EngineOrder(CloudPolicy):
    """Ordered as for an engine that resumes anywhere and forgets nothing."""

    def orderer(self, clock: Callable[[], float], suffix_tokens: int) -> Orderer:
        return Orderer(
            capacity_tokens=None,
            block_size=1,
            tokens=self.builder.document_tokens,
            prefix_tokens=self.builder.prefix_tokens,
            suffix_tokens=suffix_tokens,
            strict=True,
        )

    def confirm(self, ordering: Ordering[Document], usage: Mapping[str, Any]) -> None:
        # What a cloud has not found an engine would have.
        ordering.confirm()


class ForCloud(CloudPolicy):
    """`Orderer.for_rules`."""

    def orderer(self, clock: Callable[[], float], suffix_tokens: int) -> Orderer:
        return make_orderer(self.rules, self.builder, clock, suffix_tokens)

    def predicted(self, ordering: Ordering[Document]) -> int:
        return ordering.cached_tokens

    def body(self, query: str, ordering: Ordering[Document]) -> dict[str, Any]:
        prompt = self.builder.build(query, ordering)
        # Parts, which the simulated cloud tells apart where a provider finds tokens.
        return prompt.anthropic() if self.additive else prompt.parts.openai()


def _at_the_end(documents: int) -> Sequence[int]:
    return [0, documents]


def _four(documents: int) -> Sequence[int]:
    return sorted({0, -(-documents // 3), -(-2 * documents // 3), documents})


POLICIES: Mapping[str, Callable[..., CloudPolicy]] = {
    "automatic": CloudPolicy,
    # ContextPilot 0.5.0's adapters mark no document in a user's message.
    "system prompt": partial(CloudPolicy, marks=lambda documents: [0]),
    "end": partial(CloudPolicy, marks=_at_the_end),
    "sorted by id, four": partial(SortedById, marks=_four),
    "engine order, end": partial(EngineOrder, marks=_at_the_end),
    "engine order, four": partial(EngineOrder, marks=_four),
    "ragorder": ForCloud,
}


def make_orderer(rules: CacheRules, builder: PromptBuilder, clock: Callable[[], float], suffix_tokens: int) -> Orderer:
    """`Orderer.for_rules`, for all requests or conversations of a run."""
    return Orderer.for_rules(rules, builder=builder, clock=clock, suffix_tokens=suffix_tokens, strict=True)


class CloudChat(ABC):
    """A conversation, as an application keeps it: texts of messages, or of their parts."""

    def __init__(self, rules: CacheRules, builder: PromptBuilder, orderer: Orderer) -> None:
        self.rules = rules
        self.builder = builder
        self.orderer = orderer
        self.additive = rules.usage is not None and rules.usage.additive
        self.predicted_tokens = -1

    @abstractmethod
    def ask(self, question: str, documents: Sequence[Document]) -> dict[str, Any]:
        """The body to send."""

    def readable(self) -> None:  # noqa: B027
        """The answer's first token is there."""

    @abstractmethod
    def answered(self, text: str, usage: Mapping[str, Any]) -> None: ...


class PartsChat(CloudChat):
    """Each turn's documents in a message of its own, the history replayed: a part for each document.

    `marks` finds, by message, the parts before each mark, besides the one after the system prompt; None: the provider
    sets one by itself, at the end.
    """

    def __init__(
        self,
        rules: CacheRules,
        builder: PromptBuilder,
        orderer: Orderer,
        marks: Callable[[Sequence[Sequence[str]]], Mapping[int, Sequence[int]]] | None = None,
        *,
        by_id: bool = False,
    ) -> None:
        super().__init__(rules, builder, orderer)
        self.messages: list[list[str]] = []
        self._marks, self._by_id = marks, by_id

    def ask(self, question: str, documents: Sequence[Document]) -> dict[str, Any]:
        shown = sorted(documents, key=lambda document: document.id) if self._by_id else documents
        asked = self.builder.user_message(question, (), ())
        self.messages.append([*map(self.builder.document_text, shown), asked])
        marks = {} if self._marks is None else self._marks(self.messages)
        content = anthropic_content if self.additive else openai_content
        options = (self.rules.ttl,) if self.additive else ()
        messages = [
            {"role": _ROLES[number % 2], "content": content(texts, marks.get(number, ()), *options)}
            for number, texts in enumerate(self.messages)
        ]
        front = content([self.builder.system], [] if self._marks is None else [1], *options)
        if self.additive:
            return {"system": front, "messages": messages} | (_AUTOMATIC if self._marks is None else {})
        body: dict[str, Any] = {"messages": [{"role": "system", "content": front}, *messages]}
        return body if self._marks is None else body | {"prompt_cache_options": {"mode": "explicit"}}

    def answered(self, text: str, usage: Mapping[str, Any]) -> None:
        self.messages.append([text])


def _after_documents_and_turns(messages: Sequence[Sequence[str]]) -> Mapping[int, Sequence[int]]:
    """After the first turn's documents, where the turn before ended, and at the end."""
    last = len(messages) - 1
    marks: dict[int, list[int]] = {0: [len(messages[0]) - 1]}
    for number in {max(0, last - 2), last}:
        marks.setdefault(number, []).append(len(messages[number]))
    return marks


class TurnChat(CloudChat):
    """`PromptBuilder.turn`."""

    turn: Turn

    def __init__(self, rules: CacheRules, builder: PromptBuilder, orderer: Orderer) -> None:
        super().__init__(rules, builder, orderer)
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str, documents: Sequence[Document]) -> dict[str, Any]:
        self.turn = self.builder.turn(question, documents, history=self.messages, orderer=self.orderer)
        self.predicted_tokens = self.turn.ordering.cached_tokens
        return self.turn.anthropic() if self.additive else self.turn.openai()

    def readable(self) -> None:
        self.turn.ordering.readable()

    def answered(self, text: str, usage: Mapping[str, Any]) -> None:
        read = read_cloud_usage(usage, self.rules)
        self.messages = self.turn.answered(text)
        self.turn.ordering.confirm(
            read.cached_tokens, prompt_tokens=read.prompt_tokens, written_tokens=read.written_tokens
        )


CHATS: Mapping[str, Callable[..., CloudChat]] = {
    "automatic": PartsChat,
    "system prompt": partial(PartsChat, marks=lambda messages: {}),
    "sorted by id, four": partial(PartsChat, marks=_after_documents_and_turns, by_id=True),
    "ragorder": TurnChat,
}
