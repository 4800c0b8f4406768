"""Request bodies by route; unchanged fields keep their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import NOT_JSON
from ragorder.adapters.structs import readable_by_threads

T = TypeVar("T")

Fields = dict[str, Raw]

Route = Literal["chat", "cohere", "completions", "messages", "responses", "other"]

BOUNDARY = "\ud800"
"""Separator of a message's joined parts: a code point that no decoded UTF-8 text contains."""

_NULL = Raw(b"null")
_TOOL_MARKS = (b'"cache_control"', b'"prompt_cache_breakpoint"')


class PromptPrefix(NamedTuple):
    """Whole messages before the documents, and the start of their own message."""

    messages: Sequence[Raw] = ()
    role: str = "user"
    parts: Sequence[Raw] = ()
    text: str = ""


class PromptSuffix(NamedTuple):
    text: str = ""
    parts: Sequence[Raw] = ()
    messages: Sequence[Raw] = ()


class Passage(NamedTuple):
    """A plain prompt, or the `field` of message `place`: a text, or adjacent text parts from part `number` on, joined
    by `BOUNDARY`. Content `nested` in a part (a tool's result) has the message's parts as `outer`."""

    text: str
    messages: Sequence[Raw] = ()
    place: int = 0
    role: str = "user"
    parts: Sequence[Raw] = ()
    number: int = 0
    field: str = "content"
    outer: Sequence[Raw] = ()
    nested: int | None = None

    def prefix(self, head: str) -> PromptPrefix:
        """Takes quadratic time if called for all passages."""
        *before, own = head.split(BOUNDARY)
        role, parts = self.role, self.parts[: self.number + len(before)]
        if self.nested is not None:
            role, parts = f"{role}/{self.field}", [*self.outer[: self.nested], _NULL, *parts]
        return PromptPrefix(self.messages[: self.place], role, parts, own)

    def suffix(self, tail: str) -> PromptSuffix:
        own = tail.partition(BOUNDARY)[0]
        number = self.number + self.text.count(BOUNDARY) - tail.count(BOUNDARY)
        parts = self.parts[number + 1 :]
        if self.nested is not None:
            parts = [*parts, *self.outer[self.nested + 1 :]]
        return PromptSuffix(own, parts, self.messages[self.place + 1 :])


class Body:
    route: ClassVar[str]
    shapes_prefix: ClassVar[Sequence[str]] = (
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "functions",
        "mm_processor_kwargs",
        "reasoning_effort",
        "tool_choice",
        "tools",
    )
    """Fields besides the messages that change what a server renders before the documents."""
    limits: ClassVar[Sequence[str]] = ("max_completion_tokens", "max_tokens")
    """Fields with the longest answer in tokens; the first one counts."""
    is_changed = False
    """Whether more than the documents has changed."""
    values = 0
    """Upper bound of the number of JSON values."""
    takes_cache_key = False
    """Whether the server routes by a cache key."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def prefix(self) -> PromptPrefix:
        """Raises HTTPError for a malformed prompt."""
        raise NotImplementedError

    def append(self, turn: str) -> None:
        raise NotImplementedError

    def passages(self) -> Iterator[Passage]:
        raise NotImplementedError

    def put(self, passage: Passage, text: str) -> None:
        raise NotImplementedError

    def is_turn(self, passage: Passage) -> bool:
        return False

    def is_history(self, passage: Passage) -> bool:
        """Return whether an answer follows the passage."""
        return False

    def sort_tools(self) -> None:
        """Sort tools by name, unless the client sets breakpoints in them."""
        tools = decode(self.fields.get("tools", _NULL), list[Raw]) or []
        if any(mark in bytes(tool) for tool in tools for mark in _TOOL_MARKS):
            return
        ordered = sorted(tools, key=_tool_key)
        if ordered != tools:
            self.fields["tools"] = encode(ordered)
            self.is_changed = True

    def wants_cache_key(self) -> bool:
        return self.takes_cache_key and self.fields.get("prompt_cache_key", _NULL) == _NULL

    def number(self, name: str) -> int | None:
        return decode(self.fields[name], int) if name in self.fields else None

    def string(self, name: str) -> str | None:
        """Return None if absent or null. Raises HTTPError for other types."""
        if name not in self.fields or self.fields[name] == _NULL:
            return None
        value = decode(self.fields[name], str)
        if value is None:
            raise HTTPError(400, f"{name}: must be a string.", code=f"invalid_{name}", param=name)
        return value


@readable_by_threads
class _Tool(Struct):
    name: Raw = _NULL
    type: Raw = _NULL
    function: Raw = _NULL


def _tool_key(tool: Raw) -> tuple[str, str, bytes]:
    read = decode(tool, _Tool) or _Tool()
    named = decode(read.function, _Tool) or read
    return decode(named.name, str) or "", decode(read.type, str) or "", bytes(tool)


class CompletionBody(Body):
    route = "completions"

    def prefix(self) -> PromptPrefix:
        prompt = decode(self.fields.get("prompt", Raw(b'""')), str)
        if prompt is None:
            raise HTTPError(400, "prompt: must be one string.", code="invalid_prompt", param="prompt")
        return PromptPrefix(text=prompt)

    def append(self, turn: str) -> None:
        self.fields["prompt"] = encode(self.prefix().text + turn)

    def passages(self) -> Iterator[Passage]:
        prompt = decode(self.fields.get("prompt", _NULL), str)
        if prompt is not None:
            yield Passage(prompt)

    def put(self, passage: Passage, text: str) -> None:
        self.fields["prompt"] = encode(text)


def encode(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def decode(content: bytes | Raw, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(content, type=kind)
    except NOT_JSON:
        return None
