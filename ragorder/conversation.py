"""Turns of a conversation: messages that only grow, and documents that stand in them once."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ragorder._request import USUAL, Lengths
from ragorder.document import Document, Estimate
from ragorder.ordering import Ordering
from ragorder.trie.histories import History, Segment

if TYPE_CHECKING:
    from ragorder.clouds.turns import TurnParts

__all__ = [
    "REFERENCE",
    "Message",
    "MessageFormat",
    "OrdersTurns",
    "Repeat",
    "Turn",
    "digest_of",
    "message_key",
    "read_history",
    "segments_of",
    "texts_of",
]

Message = Mapping[str, Any]
Repeat = Literal["name", "send"]

REFERENCE = "[{id}] is above.\n"
"""Line for a document that stands in an earlier message."""

# What a chat template can show of a message: others do not change its tokens.
_SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning")


class OrdersTurns(Protocol):
    """As much of an orderer as a turn needs."""

    def order(
        self,
        documents: Iterable[Document],
        *,
        waiting: Sequence[Iterable[Document]] = (),
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> Ordering[Document]: ...

    def predict_cached_tokens(
        self,
        documents: Iterable[Document],
        *,
        scope: Hashable = None,
        history: History | None = None,
    ) -> tuple[int, int]: ...

    def has_lost(self, history: History, *, scope: Hashable = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a prompt builder writes messages.

    `document_text` is a document as it stands in a prompt, `header` the beginning of that, up to the text, by which a
    later version of the document is recognised. Directly behind a document stands one of `openings` (none: anything).
    `count` gives a text's tokens; `turn_tokens` of template text stand behind a user's message, `closing_tokens` behind
    an answer. `estimated`: by the number of characters.
    """

    system: str
    system_role: bool
    document_text: Callable[[Document], str]
    header: Callable[[Document], str]
    question: Callable[[str, Sequence[Document]], str]
    escape: Callable[[str], str]
    count: Callable[[str], int]
    openings: tuple[str, ...]
    turn_tokens: int
    closing_tokens: int
    estimated: bool
    message_tokens: Callable[[str, Callable[[], int]], int]
    """The length known under a message's key, else that of the callable."""


@dataclass(slots=True, eq=False)
class Turn:
    """A question or a tool's result with its documents, at the end of a conversation.

        turn = builder.turn(question, documents, history=messages, orderer=orderer)
        answer = ask(turn.messages)
        messages = turn.confirm(answer.text, answer.cached_tokens, answer.total_tokens)

    - `messages`: those to send, the history's as they were. For a cloud that resumes at marks the new one consists of
      parts, one a document; `anthropic()`, `openai()` and `bedrock()` are arguments of its client, with the marks
    - `ordering`: of the documents `new`, those that are sent, in prompt order
    - `repeated`: documents named instead, best first
    - `rebased`: the engine had lost the conversation, and it is laid out again (`rebase`): `new` are its documents,
      also of earlier turns, in front of the first question, and all of this turn are `repeated`
    """

    messages: list[dict[str, Any]]
    ordering: Ordering[Document]
    repeated: list[Document]
    rebased: bool = False
    _closing_tokens: int = field(default=0, repr=False)
    _front: int = field(default=0, repr=False)
    _bearer: int = field(default=-1, repr=False)

    @property
    def message(self) -> dict[str, Any]:
        return self.messages[-1]

    @property
    def bearer(self) -> dict[str, Any]:
        """The message in which the documents `new` stand."""
        return self.messages[self._bearer]

    @property
    def new(self) -> list[Document]:
        return self.ordering.documents

    def anthropic(self) -> dict[str, Any]:
        """For `client.messages.create(model=…, max_tokens=…, **turn.anthropic())`. Raises ValueError for messages of
        tools, which have another form there."""
        return self._parts().anthropic()

    def openai(self) -> dict[str, Any]:
        """For `client.chat.completions.create(model=…, **turn.openai())`."""
        return self._parts().openai()

    def bedrock(self) -> dict[str, Any]:
        """For `client.converse(modelId=…, **turn.bedrock())`. Raises as `anthropic` does."""
        return self._parts().bedrock()

    def answered(self, answer: str | Message) -> list[dict[str, Any]]:
        """The messages with their answer, a text or an assistant's message; later turns find it in the engine's cache.
        Before `ordering.confirm`."""
        said = {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)
        keys = message_key(self.bearer), message_key(said)
        self.ordering.remember_as(*keys, closing_tokens=self._closing_tokens)
        return [*self.messages, said]

    def confirm(
        self,
        answer: str | Message,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        *,
        prompt_tokens: float | None = None,
        written_tokens: float | None = None,
    ) -> list[dict[str, Any]]:
        """The engine answered; token counts as for `Ordering.confirm`. Returns the messages with the answer: the next
        turn's history."""
        messages = self.answered(answer)
        counts = {} if self.ordering.cloud is None else {"written_tokens": written_tokens}
        self.ordering.confirm(cached_tokens, total_tokens, prompt_tokens=prompt_tokens, **counts)
        return messages

    def discard(self) -> None:
        """The request failed or was never sent: the history stays as it was."""
        self.ordering.discard()

    def _parts(self) -> TurnParts:
        from ragorder.clouds.turns import TurnMarks, TurnParts

        cloud = self.ordering.cloud
        if cloud is None:
            return TurnParts(self.messages, self._front, TurnMarks())
        rules = cloud.model.rules
        explicit = rules.resume == "marks"
        return TurnParts(self.messages, self._front, cloud.turn_marks, rules.ttl, explicit=explicit)


def read_history(history: Iterable[Message], form: MessageFormat) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages behind the system prompt, and the message of that. Raises TypeError for objects that are no
    messages, ValueError for another system prompt than the builder's."""
    messages = []
    for message in history:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"history must hold messages such as {{'role': 'user', …}}, got {type(message).__name__}")
        messages.append(dict(message))
    front: list[dict[str, Any]] = []
    if form.system and form.system_role:
        front = [{"role": "system", "content": form.system}]
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0].get("content") != form.system:
            raise ValueError(
                "the history begins with another system prompt than the builder's: leave it out, or give its text as "
                "PromptBuilder(system=…)"
            )
        front = [messages.pop(0)]
    return messages, front


def segments_of(messages: Sequence[Message], form: MessageFormat) -> list[Segment]:
    """Return the segments of a `History`."""
    segments = []
    for message in messages:
        key = message_key(message)
        closing = form.closing_tokens if message.get("role") == "assistant" else form.turn_tokens
        segments.append(Segment(key, form.message_tokens(key, partial(_count, form, message, closing))))
    return segments


def message_key(message: Message) -> str:
    """Digest of what a chat template can show of a message. Raises TypeError for one that cannot be sent as JSON."""
    shown = {name: message[name] for name in _SHOWN if message.get(name) is not None}
    return digest_of(json.dumps(shown, sort_keys=True, separators=(",", ":")))


def _count(form: MessageFormat, message: Message, closing_tokens: int) -> int:
    calls = message.get("tool_calls") or message.get("function_call")
    texts = [*texts_of(message), *([json.dumps(calls)] if calls else [])]
    return _length(form, sum(map(form.count, texts)) + closing_tokens)


def _length(form: MessageFormat, tokens: int) -> int:
    return Estimate(tokens) if form.estimated else tokens


def texts_of(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, Sequence) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def digest_of(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
