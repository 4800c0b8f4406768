"""Bodies of conversations: OpenAI's chats and responses, Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Any, ClassVar

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.bodies.body import BOUNDARY, Body, Fields, Passage, PromptPrefix, decode, encode
from ragorder.adapters.proxy.bodies.marks import Chunk, MarkForm, chunk_part, mark_last, takes_mark, turn_ends
from ragorder.adapters.structs import readable_by_threads

_NULL = Raw(b"null")
_INSTRUCTIONS = ("system", "developer")


@readable_by_threads
class _Message(Struct):
    role: Raw = _NULL
    content: Raw = _NULL
    type: Raw = _NULL
    output: Raw = _NULL
    """A tool's output in OpenAI's responses."""


@readable_by_threads
class _ContentPart(Struct):
    text: Raw = _NULL
    content: Raw = _NULL


class ChatBody(Body):
    route = "chat"
    messages_field: ClassVar[str] = "messages"
    instructions_field: ClassVar[str] = ""
    """Field that counts as a first system message, if the API has one."""
    content_fields: ClassVar[Sequence[str]] = ("content",)
    has_nested_content: ClassVar[bool] = False
    text_kind: ClassVar[str] = "text"

    def prefix(self) -> PromptPrefix:
        messages = self._messages(self.fields.get(self.messages_field, Raw(b"[]")))
        if messages is None:
            where = self.messages_field
            raise HTTPError(400, f"{where}: must be a list.", code=f"invalid_{where}", param=where)
        return PromptPrefix(messages)

    def append(self, turn: object) -> None:
        messages = [*self.prefix().messages, encode({"role": "user", "content": turn})]
        self._put_messages(messages, {len(messages) - 1})

    def passages(self) -> Iterator[Passage]:
        messages = self._messages(self.fields.get(self.messages_field, _NULL)) or []
        for place, raw in enumerate(messages):
            message = decode(raw, _Message) or _Message()
            # A model's reasoning is its own text, and has no role.
            is_reasoning = decode(message.type, str) == "reasoning"
            role = "assistant" if is_reasoning else decode(message.role, str) or ""
            for field in self.content_fields:
                own = Passage("", messages, place, role if field == "content" else "tool", field=field)
                yield from self._texts(own, getattr(message, field))

    def put(self, passage: Passage, text: str) -> None:
        self.put_all([(passage, text)])

    def put_messages(self, changed: Mapping[int, Raw]) -> None:
        """Replace messages, by their numbers in `prefix`."""
        messages = list(self.prefix().messages)
        for place, message in changed.items():
            messages[place] = message
        self._put_messages(messages, changed.keys())

    def put_all(self, changes: Sequence[tuple[Passage, str]]) -> None:
        """Replace the texts of passages, given in their order."""
        if not changes:
            return
        messages = list(changes[0][0].messages)
        places = set()
        for place, in_message in groupby(changes, lambda change: change[0].place):
            message = msgspec.json.decode(messages[place], type=Fields)
            for field, in_field in groupby(in_message, lambda change: change[0].field):
                message[field] = _rewritten(message[field], list(in_field))
            messages[place] = encode(message)
            places.add(place)
        self._put_messages(messages, places)

    def append_chunks(self, chunks: Sequence[Chunk], form: MarkForm) -> None:
        self.append([chunk_part({"type": self.text_kind}, chunk, form) for chunk in chunks])

    def put_chunks(self, passage: Passage, chunks: Sequence[Chunk], form: MarkForm) -> None:
        """Replace a passage that is not nested."""
        parts: list[Any] = list(passage.parts[: passage.number])
        for chunk in chunks:
            part: dict[str, Any] = {"type": self.text_kind}
            if passage.parts:
                part = msgspec.json.decode(passage.parts[passage.number + chunk.part], type=Fields)
            parts.append(chunk_part(part, chunk, form))
        if passage.parts:
            parts += passage.parts[passage.number + passage.text.count(BOUNDARY) + 1 :]
        messages = list(passage.messages)
        message: dict[str, Any] = msgspec.json.decode(messages[passage.place], type=Fields)
        messages[passage.place] = encode(message | {passage.field: parts})
        self._put_messages(messages, {passage.place})

    def can_be_divided(self, passage: Passage) -> bool:
        return passage.nested is None and passage.field == "content"

    def takes_front_mark(self, passage: Passage | None, form: MarkForm) -> bool:
        messages, place, parts = self._front(passage)
        return place >= 0 and takes_mark(messages[place], form, self.text_kind, parts)

    def mark_front(self, passage: Passage | None, form: MarkForm) -> None:
        _, place, parts = self._front(passage)
        if place >= 0:
            self._mark([(place, parts)], form)

    def turn_ends(self, form: MarkForm) -> tuple[int, ...]:
        messages = self._messages(self.fields.get(self.messages_field, _NULL)) or []
        return turn_ends(messages, form, self.text_kind, _is_answer)

    def mark_around(
        self, passage: Passage | None, form: MarkForm, *, front: bool = False, ends: Sequence[int] = ()
    ) -> None:
        if front:
            self.mark_front(passage, form)
        self._mark([(place, None) for place in ends], form)
        self.fields |= form.besides

    def _front(self, passage: Passage | None) -> tuple[Sequence[Raw], int, int | None]:
        """Return the messages, the number of the last one before a passage (or -1), and if that is the passage's own,
        how many parts are before it."""
        messages = self._messages(self.fields.get(self.messages_field, _NULL)) or []
        if passage is None:
            return messages, len(messages) - 1, None
        if passage.number:
            return messages, passage.place, passage.number
        return messages, passage.place - 1, None

    def _mark(self, places: Sequence[tuple[int, int | None]], form: MarkForm) -> None:
        messages = list(self._messages(self.fields.get(self.messages_field, _NULL)) or [])
        changed = set()
        for place, parts in places:
            marked = mark_last(messages[place], form, self.text_kind, parts)
            if marked is not None:
                messages[place] = marked
                changed.add(place)
        if changed:
            self._put_messages(messages, changed)

    def is_turn(self, passage: Passage) -> bool:
        return passage.role not in _INSTRUCTIONS

    def is_history(self, passage: Passage) -> bool:
        # A last message of the assistant is the beginning of the wanted answer, written by the client.
        return self.is_turn(passage) and any(map(_is_answer, passage.messages[passage.place + 1 : -1]))

    def _texts(self, own: Passage, content: Raw) -> Iterator[Passage]:
        text = decode(content, str)
        if text is not None:
            yield own._replace(text=text)
            return
        parts = decode(content, list[Raw]) or []
        read = [decode(part, _ContentPart) or _ContentPart() for part in parts]
        texts = enumerate(decode(part.text, str) for part in read)
        for is_text, neighbours in groupby(texts, lambda part: part[1] is not None):
            numbers, texts_of_parts = zip(*neighbours, strict=True)
            if is_text:
                yield own._replace(text=BOUNDARY.join(texts_of_parts), parts=parts, number=numbers[0])
            elif self.has_nested_content and own.nested is None:
                for number in numbers:
                    inner = own._replace(role="tool", outer=parts, nested=number)
                    yield from self._texts(inner, read[number].content)

    def _instructions(self) -> int:
        return int(self.fields.get(self.instructions_field, _NULL) != _NULL)

    def _messages(self, content: Raw) -> list[Raw] | None:
        """Return instructions and messages, or None for anything but a list."""
        messages = decode(content, list[Raw])
        if messages is None or not self._instructions():
            return messages
        return [encode({"role": "system", "content": self.fields[self.instructions_field]}), *messages]

    def _put_messages(self, messages: Sequence[Raw], places: Set[int]) -> None:
        first = self._instructions()
        if first and 0 in places:
            self.fields[self.instructions_field] = msgspec.json.decode(messages[0], type=Fields)["content"]
        if any(place >= first for place in places):
            self.fields[self.messages_field] = encode(messages[first:])


class CohereBody(ChatBody):
    """Body of Cohere's chats, version 2."""

    route = "cohere"
    limits = ("max_tokens",)
    shapes_prefix = (
        "chat_template_kwargs",
        "citation_options",
        "documents",
        "response_format",
        "safety_mode",
        "strict_tools",
        "thinking",
        "tool_choice",
        "tools",
    )


class ResponsesBody(ChatBody):
    """Body of OpenAI's responses. A text as `input` is a user message; earlier responses are only an id."""

    route = "responses"
    messages_field = "input"
    instructions_field = "instructions"
    content_fields = ("content", "output")
    text_kind = "input_text"
    takes_cache_key = True
    limits = ("max_output_tokens",)
    shapes_prefix = (
        "chat_template_kwargs",
        "conversation",
        "previous_response_id",
        "prompt",
        "reasoning",
        "text",
        "tool_choice",
        "tools",
    )

    def _messages(self, content: Raw) -> list[Raw] | None:
        text = decode(content, str)
        if text is not None:
            content = encode([{"role": "user", "content": text}] if text else [])
        return super()._messages(content)

    def can_be_divided(self, passage: Passage) -> bool:
        # The instructions are a text.
        return super().can_be_divided(passage) and passage.place >= self._instructions()

    def takes_front_mark(self, passage: Passage | None, form: MarkForm) -> bool:
        _, place, _ = self._front(passage)
        return place >= self._instructions() and super().takes_front_mark(passage, form)

    def mark_front(self, passage: Passage | None, form: MarkForm) -> None:
        if self.takes_front_mark(passage, form):
            super().mark_front(passage, form)

    def _put_messages(self, messages: Sequence[Raw], places: Set[int]) -> None:
        was_text = decode(self.fields.get(self.messages_field, _NULL), str) is not None
        super()._put_messages(messages, places)
        only = messages[self._instructions() :]
        if was_text and len(only) == 1:
            content = msgspec.json.decode(only[0], type=Fields)["content"]
            if decode(content, str) is not None:
                self.fields[self.messages_field] = content


class MessagesBody(ChatBody):
    """Body of Anthropic's messages. Tool results are parts of a user message, with their own content."""

    route = "messages"
    instructions_field = "system"
    has_nested_content = True
    limits = ("max_tokens",)
    shapes_prefix = ("chat_template_kwargs", "output_config", "thinking", "tool_choice", "tools")


def _rewritten(content: Raw, changes: Sequence[tuple[Passage, str]]) -> Raw:
    first, text = changes[0]
    if first.nested is None and not first.parts:
        return encode(text)
    parts = msgspec.json.decode(content, type=list[Raw])
    for nested, group in groupby(changes, lambda change: change[0].nested):
        if nested is None:
            for passage, becomes in group:
                _put_parts(parts, passage, becomes)
        else:
            block = msgspec.json.decode(parts[nested], type=Fields)
            inner = [(passage._replace(nested=None), becomes) for passage, becomes in group]
            parts[nested] = encode(block | {"content": _rewritten(block["content"], inner)})
    return encode(parts)


def _put_parts(parts: list[Raw], passage: Passage, text: str) -> None:
    pairs = zip(passage.text.split(BOUNDARY), text.split(BOUNDARY), strict=True)
    for number, (was, becomes) in enumerate(pairs, passage.number):
        if becomes != was:
            parts[number] = encode(msgspec.json.decode(parts[number], type=Fields) | {"text": becomes})


def _is_answer(raw: Raw) -> bool:
    message = decode(raw, _Message)
    if message is None:
        return False
    kind = decode(message.type, str) or ""
    return decode(message.role, str) == "assistant" or kind == "reasoning" or kind.endswith("_call")
