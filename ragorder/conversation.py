"""Turns of a conversation whose messages only grow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from ragorder.common.counts import Estimate
from ragorder.common.lru_cache import LRUCache
from ragorder.document import Document
from ragorder.ordering import Ordering
from ragorder.trie.histories import Segment

if TYPE_CHECKING:
    from ragorder.clouds.turns import TurnParts

Message = Mapping[str, Any]
Repeat = Literal["name", "send"]

REFERENCE = "[{id}] is above.\n"
"""Line for a document that an earlier message contains."""

# Fields of a message that a chat template can show; others do not change its tokens.
_SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a prompt builder writes messages.

    `header` returns a document up to its text. One of `openings` follows a document (empty: any text). Templates add
    `turn_tokens` after a user's message, `closing_tokens` after an answer.
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
    message_tokens: LRUCache[int]


@dataclass(slots=True, eq=False)
class Turn:
    """A conversation's last question or tool's result, with its documents.

        turn = builder.turn(question, documents, history=messages, orderer=orderer)
        answer = ask(turn.messages)
        messages = turn.confirm(answer.text, answer.cached_tokens, answer.total_tokens)

    - `messages`: those to send, the history's unchanged
    - `ordering`: of the documents sent, `new`
    - `repeated`: documents named instead of sent, best first
    - `rebased`: the engine had evicted the conversation: `new` has the documents of all turns, `repeated` this turn's
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
        return self.messages[self._bearer]

    @property
    def new(self) -> list[Document]:
        return self.ordering.documents

    def anthropic(self) -> dict[str, Any]:
        """Return arguments for `client.messages.create(model=…, max_tokens=…, **turn.anthropic())`.

        Raises ValueError for messages of tools.
        """
        return self._parts().anthropic()

    def openai(self) -> dict[str, Any]:
        """Return arguments for `client.chat.completions.create(model=…, **turn.openai())`."""
        if self.ordering.cloud is None:
            return {"messages": list(map(dict, self.messages))}
        return self._parts().openai()

    def bedrock(self) -> dict[str, Any]:
        """Return arguments for `client.converse(modelId=…, **turn.bedrock())`. Raises as `anthropic`."""
        return self._parts().bedrock()

    def answered(self, answer: str | Message) -> list[dict[str, Any]]:
        """Return the messages with the answer, which later turns find if this is called before `ordering.confirm`."""
        said = {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)
        keys = message_key(self.bearer), message_key(said)
        self.ordering.set_history_keys(*keys, closing_tokens=self._closing_tokens)
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
        """Record the answer and return the next turn's history. Counts as for `Ordering.confirm`."""
        messages = self.answered(answer)
        counts = {} if self.ordering.cloud is None else {"written_tokens": written_tokens}
        self.ordering.confirm(cached_tokens, total_tokens, prompt_tokens=prompt_tokens, **counts)
        return messages

    def discard(self) -> None:
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
    """Return the messages after the system prompt, and the system prompt's own."""
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
    segments = []
    for message in messages:
        key = message_key(message)
        tokens = form.message_tokens.get(key)
        if tokens is None:
            closing = form.closing_tokens if message.get("role") == "assistant" else form.turn_tokens
            tokens = _count(form, message, closing)
            form.message_tokens.put(key, tokens)
        segments.append(Segment(key, tokens))
    return segments


def message_key(message: Message) -> str:
    shown = {name: message[name] for name in _SHOWN if message.get(name) is not None}
    return digest_of(json.dumps(shown, sort_keys=True, separators=(",", ":")))


def _count(form: MessageFormat, message: Message, closing_tokens: int) -> int:
    calls = message.get("tool_calls") or message.get("function_call")
    texts = [*texts_of(message), *([json.dumps(calls)] if calls else [])]
    tokens = sum(map(form.count, texts)) + closing_tokens
    return Estimate(tokens) if form.estimated else tokens


def texts_of(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, Sequence) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def digest_of(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def name_in(reference: str, document: Document) -> str:
    return reference.format(id=document.id, title=str(document.metadata.get("title", "")))


@lru_cache(maxsize=64)
def opening_of(template: str) -> str:
    return next((literal for literal, *_ in Formatter().parse(template)), "")
