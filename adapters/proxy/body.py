"""The bodies of the two routes, field by field: what is not changed goes on as the bytes that it came as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.proxy.reading import TooManyError, decode, decode_items

__all__ = ["BOUNDARY", "MAX_MESSAGES", "Behind", "Body", "ChatBody", "CompletionBody", "Fields", "Front", "Passage"]

Fields = dict[str, Raw]

MAX_MESSAGES = 4096
"""Messages of a chat, and parts of a message, that are read."""

BOUNDARY = "\ud800"
"""Where a part of a message ends and the next one begins, in the text of both: a code point that no JSON text has."""


_NULL = Raw(b"null")


class _Message(Struct):
    """Of a message what is looked at. Its other fields are passed over, however many there are."""

    role: Raw = _NULL
    content: Raw = _NULL


class _Part(Struct):
    """The same of a part of one."""

    text: Raw = _NULL


class Front(NamedTuple):
    """What of a prompt stands in front of its documents: whole messages; in the documents' own message, its role, parts
    and text."""

    messages: Sequence[Raw] = ()
    role: str = "user"
    parts: Sequence[Raw] = ()
    text: str = ""


class Behind(NamedTuple):
    """What of a prompt stands behind its documents: text and parts of their own message, whole messages."""

    text: str = ""
    parts: Sequence[Raw] = ()
    messages: Sequence[Raw] = ()


class Passage(NamedTuple):
    """A text of the prompt: a plain prompt, the content of a message, or the texts of parts that are neighbours, with
    `BOUNDARY` between them. It is in message `place` of `messages`, there from part `number` of `parts` on."""

    text: str
    messages: Sequence[Raw] = ()
    place: int = 0
    role: str = "user"
    parts: Sequence[Raw] = ()
    number: int = 0

    def front(self, head: str) -> Front:
        """What stands in front of the documents, which come after `head` in the text. It is made for the one passage
        that is taken: made for each, it would take a time that grows with the square of the messages."""
        *before, own = head.split(BOUNDARY)
        return Front(self.messages[: self.place], self.role, self.parts[: self.number + len(before)], own)

    def behind(self, tail: str) -> Behind:
        """What stands behind the documents, `tail` of the text with it."""
        own = tail.partition(BOUNDARY)[0]
        number = self.number + self.text.count(BOUNDARY) - tail.count(BOUNDARY)
        return Behind(own, self.parts[number + 1 :], self.messages[self.place + 1 :])


class Body:
    """A request's body as its fields; `route` says which of the two it is."""

    route: ClassVar[str]

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def front(self) -> Front:
        """What there is of a prompt already. Raises ProxyError if it is not what it should be."""
        raise NotImplementedError

    def append(self, turn: str) -> None:
        """Put documents and question behind it."""
        raise NotImplementedError

    def passages(self) -> Iterator[Passage]:
        """The texts of the prompt, first to last. What cannot be read is left out. Raises ProxyError if there are too
        many of them."""
        raise NotImplementedError

    def put(self, passage: Passage, text: str) -> None:
        """Put another text, of as many parts, in the place of a passage's."""
        raise NotImplementedError

    def number(self, name: str) -> int | None:
        """A field that is a number; None if it is not."""
        return decode(self.fields[name], int) if name in self.fields else None

    def string(self, name: str) -> str | None:
        """A field that is a string; None if it is not there or null. Raises ProxyError if it is something else."""
        if name not in self.fields or self.fields[name] == _NULL:
            return None
        value = decode(self.fields[name], str)
        if value is None:
            raise ProxyError(400, f"{name}: must be a string.", code=f"invalid_{name}", param=name)
        return value


class ChatBody(Body):
    """The body of a chat: documents and question become a user's message."""

    route = "chat"

    def front(self) -> Front:
        messages = _items(self.fields.get("messages", Raw(b"[]")), "messages")
        if messages is None:
            raise ProxyError(400, "messages: must be a list.", code="invalid_messages", param="messages")
        return Front(messages)

    def append(self, turn: str) -> None:
        message = {"role": "user", "content": turn}
        self.fields["messages"] = _raw([*self.front().messages, message])

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
            texts = enumerate(decode((decode(part, _Part) or _Part()).text, str) for part in parts)
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
    """The body of a plain completion: documents and question come behind the prompt, which must be one text."""

    route = "completions"

    def front(self) -> Front:
        prompt = decode(self.fields.get("prompt", Raw(b'""')), str)
        if prompt is None:
            raise ProxyError(400, "prompt: must be one string.", code="invalid_prompt", param="prompt")
        return Front(text=prompt)

    def append(self, turn: str) -> None:
        self.fields["prompt"] = _raw(self.front().text + turn)

    def passages(self) -> Iterator[Passage]:
        prompt = decode(self.fields.get("prompt", _NULL), str)
        if prompt is not None:
            yield Passage(prompt)

    def put(self, passage: Passage, text: str) -> None:
        self.fields["prompt"] = _raw(text)


def _items(content: Raw, where: str) -> list[Raw] | None:
    """The messages, or the parts of one; None if they are no list."""
    try:
        return decode_items(content, MAX_MESSAGES)
    except TooManyError:
        message = f"{where}: has more than the {MAX_MESSAGES:,} items that the proxy reads."
        raise ProxyError(400, message, code="too_many_items", param=where) from None


def _raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))
