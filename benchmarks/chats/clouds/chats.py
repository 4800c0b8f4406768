"""Conversations at a cloud, by policy: what is sent of their turns, and where marks stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder import Document, Orderer, PromptBuilder, Turn
from ragorder.clouds import CacheRules, anthropic_content, openai_content, read_cloud_usage

__all__ = ["CHATS", "CloudChat", "make_orderer"]

_ROLES = ("user", "assistant")


def make_orderer(rules: CacheRules, builder: PromptBuilder, clock: Callable[[], float], suffix_tokens: int) -> Orderer:
    """`Orderer.for_cloud`, for all conversations of a run."""
    return Orderer.for_cloud(rules=rules, builder=builder, clock=clock, suffix_tokens=suffix_tokens, strict=True)


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
    """Each turn's documents in a message of its own, the history replayed: a part for each document."""

    def __init__(self, rules: CacheRules, builder: PromptBuilder, orderer: Orderer) -> None:
        super().__init__(rules, builder, orderer)
        self.messages: list[list[str]] = []

    def ask(self, question: str, documents: Sequence[Document]) -> dict[str, Any]:
        asked = self.builder.user_message(question, (), ())
        self.messages.append([*map(self.builder.document_text, self.arrange(documents)), asked])
        system, marks = self.marks()
        content = anthropic_content if self.additive else openai_content
        options = (self.rules.ttl,) if self.additive else ()
        messages = [
            {"role": _ROLES[number % 2], "content": content(texts, marks.get(number, ()), *options)}
            for number, texts in enumerate(self.messages)
        ]
        front = content([self.builder.system], [1] if system else [], *options)
        if self.additive:
            body: dict[str, Any] = {"system": front, "messages": messages}
            return body | ({"cache_control": {"type": "ephemeral"}} if self.automatic else {})
        body = {"messages": [{"role": "system", "content": front}, *messages]}
        return body if self.automatic else body | {"prompt_cache_options": {"mode": "explicit"}}

    def answered(self, text: str, usage: Mapping[str, Any]) -> None:
        self.messages.append([text])

    automatic = False
    """Whether the provider sets a mark by itself, at the end."""

    def arrange(self, documents: Sequence[Document]) -> Sequence[Document]:
        return documents

    def marks(self) -> tuple[bool, Mapping[int, Sequence[int]]]:
        """Whether one stands behind the system prompt, and by message the parts in front of each."""
        return False, {}


class AutomaticChat(PartsChat):
    automatic = True


class SystemPromptChat(PartsChat):
    """ContextPilot 0.5.0's adapters mark the system prompt, and no document in a user's message."""

    def marks(self) -> tuple[bool, Mapping[int, Sequence[int]]]:
        return True, {}


class SortedChat(PartsChat):
    """Sorted by id. Of the four marks one is behind the first turn's documents, one where the turn before ended."""

    def arrange(self, documents: Sequence[Document]) -> Sequence[Document]:
        return sorted(documents, key=lambda document: document.id)

    def marks(self) -> tuple[bool, Mapping[int, Sequence[int]]]:
        last = len(self.messages) - 1
        marks: dict[int, list[int]] = {0: [len(self.messages[0]) - 1]}
        for number in {max(0, last - 2), last}:
            marks.setdefault(number, []).append(len(self.messages[number]))
        return True, marks


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


CHATS: Mapping[str, type[CloudChat]] = {
    "automatic": AutomaticChat,
    "system prompt": SystemPromptChat,
    "sorted by id, four": SortedChat,
    "ragorder": TurnChat,
}
