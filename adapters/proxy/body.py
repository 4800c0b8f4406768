"""Bodies of chats and completions; unchanged fields keep their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.errors import HTTPError

__all__ = [
    "BOUNDARY",
    "MAX_MESSAGES",
    "Body",
    "ChatBody",
    "CompletionBody",
    "Fields",
    "Passage",
    "PromptPrefix",
    "PromptSuffix",
    "TooManyError",
    "decode",
    "decode_items",
]

T = TypeVar("T")

Fields = dict[str, Raw]

MAX_MESSAGES = 4096
"""Messages of a chat, and parts of a message, that are read."""

BOUNDARY = "\ud800"
"""Separates the parts of a message in their joined text: a code point that no JSON text has."""

_NULL = Raw(b"null")


class TooManyError(ValueError): ...


class _Message(Struct):
    role: Raw = _NULL
    content: Raw = _NULL


class _ContentPart(Struct):
    text: Raw = _NULL


class PromptPrefix(NamedTuple):
    """Whole messages, and the beginning of the documents' own message."""

    messages: Sequence[Raw] = ()
    role: str = "user"
    parts: Sequence[Raw] = ()
    text: str = ""


class PromptSuffix(NamedTuple):
    text: str = ""
    parts: Sequence[Raw] = ()
    messages: Sequence[Raw] = ()


class Passage(NamedTuple):
    """A plain prompt, the content of message `place`, or its adjacent text parts from part `number` on, joined by
    `BOUNDARY`."""

    text: str
    messages: Sequence[Raw] = ()
    place: int = 0
    role: str = "user"
    parts: Sequence[Raw] = ()
    number: int = 0

    def prefix(self, head: str) -> PromptPrefix:
        """Only for the chosen passage: for each it would take quadratic time."""
        *before, own = head.split(BOUNDARY)
        return PromptPrefix(self.messages[: self.place], self.role, self.parts[: self.number + len(before)], own)

    def suffix(self, tail: str) -> PromptSuffix:
        own = tail.partition(BOUNDARY)[0]
        number = self.number + self.text.count(BOUNDARY) - tail.count(BOUNDARY)
        return PromptSuffix(own, self.parts[number + 1 :], self.messages[self.place + 1 :])


class Body:
    route: ClassVar[str]

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def prefix(self) -> PromptPrefix:
        """Raises HTTPError if the prompt is malformed."""
        raise NotImplementedError

    def append(self, turn: str) -> None:
        raise NotImplementedError

    def passages(self) -> Iterator[Passage]:
        """Well-formed texts, in order. Raises HTTPError for too many."""
        raise NotImplementedError

    def put(self, passage: Passage, text: str) -> None:
        raise NotImplementedError

    def number(self, name: str) -> int | None:
        """None for any other type."""
        return decode(self.fields[name], int) if name in self.fields else None

    def string(self, name: str) -> str | None:
        """None for an absent or null field. Raises HTTPError for other types."""
        if name not in self.fields or self.fields[name] == _NULL:
            return None
        value = decode(self.fields[name], str)
        if value is None:
            raise HTTPError(400, f"{name}: must be a string.", code=f"invalid_{name}", param=name)
        return value


class ChatBody(Body):
    route = "chat"

    def prefix(self) -> PromptPrefix:
        messages = _items(self.fields.get("messages", Raw(b"[]")), "messages")
        if messages is None:
            raise HTTPError(400, "messages: must be a list.", code="invalid_messages", param="messages")
        return PromptPrefix(messages)

    def append(self, turn: str) -> None:
        message = {"role": "user", "content": turn}
        self.fields["messages"] = _raw([*self.prefix().messages, message])

    def passages(self) -> Iterator[Passage]:
        messages = _items(self.fields.get("messages", _NULL), "messages") or []
        for place, raw in enumerate(messages):
            message = decode(raw, _Message) or _Message()
            role = decode(message.role, str) or ""
            text = decode(message.content, str)
            if text is not None:
                yield Passage(text, messages, place, role)
                continue
            parts = _items(message.content, f"messages[{place}].content") or []
            texts = enumerate(decode((decode(part, _ContentPart) or _ContentPart()).text, str) for part in parts)
            for is_text, neighbours in groupby(texts, lambda part: part[1] is not None):
                if is_text:
                    numbers, own = zip(*neighbours, strict=True)
                    yield Passage(BOUNDARY.join(own), messages, place, role, parts, numbers[0])

    def put(self, passage: Passage, text: str) -> None:
        messages = list(passage.messages)
        message = msgspec.json.decode(messages[passage.place], type=Fields)
        if passage.parts:
            parts = list(passage.parts)
            pairs = zip(passage.text.split(BOUNDARY), text.split(BOUNDARY), strict=True)
            for number, (was, becomes) in enumerate(pairs, passage.number):
                if becomes != was:
                    parts[number] = _raw(msgspec.json.decode(parts[number], type=Fields) | {"text": becomes})
            message["content"] = _raw(parts)
        else:
            message["content"] = _raw(text)
        messages[passage.place] = _raw(message)
        self.fields["messages"] = _raw(messages)


class CompletionBody(Body):
    route = "completions"

    def prefix(self) -> PromptPrefix:
        prompt = decode(self.fields.get("prompt", Raw(b'""')), str)
        if prompt is None:
            raise HTTPError(400, "prompt: must be one string.", code="invalid_prompt", param="prompt")
        return PromptPrefix(text=prompt)

    def append(self, turn: str) -> None:
        self.fields["prompt"] = _raw(self.prefix().text + turn)

    def passages(self) -> Iterator[Passage]:
        prompt = decode(self.fields.get("prompt", _NULL), str)
        if prompt is not None:
            yield Passage(prompt)

    def put(self, passage: Passage, text: str) -> None:
        self.fields["prompt"] = _raw(text)


def _items(content: Raw, where: str) -> list[Raw] | None:
    try:
        return decode_items(content, MAX_MESSAGES)
    except TooManyError:
        message = f"{where}: has more than {MAX_MESSAGES:,} items, the limit of the proxy."
        raise HTTPError(400, message, code="too_many_items", param=where) from None


def _raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def decode(content: bytes | Raw, kind: type[T]) -> T | None:
    """None for another type, or what is not JSON."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_items(content: bytes | Raw, limit: int) -> list[Raw] | None:
    """None for anything but a list. Raises TooManyError before any item is built."""
    if bytes(content).count(b",") >= limit and not _fits(content, limit):
        raise TooManyError(f"a list has more than {limit:,} items")
    return decode(content, list[Raw])


def _fits(content: bytes | Raw, limit: int) -> bool:
    try:
        _short_list(limit).decode(content)
    except msgspec.ValidationError as error:
        # The other error: what is not a list has no items.
        return "length" not in str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return True


@cache
def _short_list(limit: int) -> msgspec.json.Decoder[Any]:
    """msgspec checks the length of a list after building it, that of an array-like structure on the way."""
    items = [(f"_{number}", Raw, Raw(b"")) for number in range(limit)]
    return msgspec.json.Decoder(msgspec.defstruct("Items", items, array_like=True, forbid_unknown_fields=True))
