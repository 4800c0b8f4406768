"""Documents in an API's own form: fields of chats, blocks, content parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.content_encoding import encoding_of
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers, header, without
from ragorder.adapters.proxy.bodies.body import (
    BOUNDARY,
    Body,
    Fields,
    Passage,
    PromptPrefix,
    PromptSuffix,
    decode,
    encode,
)
from ragorder.adapters.proxy.bodies.conversation import ChatBody, CohereBody, MessagesBody
from ragorder.adapters.proxy.bodies.marks import MarkForm
from ragorder.adapters.proxy.bodies.template import DocumentTemplate
from ragorder.adapters.structs import readable_by_threads
from ragorder.common.counts import estimate_tokens

_NULL = Raw(b"null")
_FIELD = "documents"
_INSTRUCTIONS = ("system", "developer")
# The name of a citation's place among all blocks of a type.
_PLACES = {"document": "document_index", "search_result": "search_result_index"}
_MOST_ANSWER = 1 << 24
# A client's breakpoints stay at their places.
_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
# Characters of a file for a token: most of them are no text.
_FILE_CHARACTERS = 40


Put = Callable[[Sequence[Raw], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class NativeDocuments:
    """Documents between a body's prefix and suffix, in a message (`passage`) or a `field`; `put` writes them back.
    `lengths` are estimated tokens; `cited` is the field of their places in citations, and the first place."""

    items: Sequence[Raw]
    lengths: Sequence[int]
    prefix: PromptPrefix
    suffix: PromptSuffix
    put: Put
    passage: Passage | None = None
    cited: tuple[str, int] | None = None
    field: str = ""

    def marked(self, permutation: Sequence[int], marked: Collection[int], form: MarkForm | None) -> list[Raw]:
        ordered = [self.items[rank] for rank in permutation]
        for place in marked if form is not None else ():
            if place and form is not None:
                fields = msgspec.json.decode(ordered[place - 1], type=Fields)
                ordered[place - 1] = encode(fields | {form.name: form.value})
        return ordered

    def text(self, permutation: Sequence[int]) -> str:
        return BOUNDARY.join(_text_of(self.items[rank]) for rank in permutation)

    def translator(self, permutation: Sequence[int]) -> CitationTranslator | None:
        if self.cited is None or list(permutation) == list(range(len(permutation))):
            return None
        name, first = self.cited
        return CitationTranslator(name, {first + place: first + rank for place, rank in enumerate(permutation)})


@readable_by_threads
class _Part(Struct):
    """A message, a part of its content, or a part's source."""

    type: Raw = _NULL
    role: Raw = _NULL
    content: Raw = _NULL
    source: Raw = _NULL
    text: Raw = _NULL


@readable_by_threads
class _Named(Struct):
    id: str


def native_documents(body: Body) -> NativeDocuments | None:
    """Return a body's first two or more documents, or None."""
    if isinstance(body, MessagesBody):
        return _in_blocks(body)
    if isinstance(body, ChatBody) and _FIELD in body.shapes_prefix:
        return _in_field(body)
    return None


def _in_field(body: ChatBody) -> NativeDocuments | None:
    items = decode(body.fields.get(_FIELD, _NULL), list[Raw]) or []
    if len(items) < 2 or not all(bytes(item).lstrip()[:1] == b"{" for item in items):
        return None
    if isinstance(body, CohereBody):
        # Documents without ids are named by their places.
        ids = [named.id for item in items if (named := decode(item, _Named)) is not None]
        if len(ids) < len(items) or len(set(ids)) < len(ids):
            return None
    messages = body.prefix().messages
    count = next((n for n, raw in enumerate(messages) if _role_of(raw) not in _INSTRUCTIONS), len(messages))

    def put(ordered: Sequence[Raw], permutation: Sequence[int]) -> None:
        body.fields[_FIELD] = encode(ordered)

    return NativeDocuments(
        items,
        [estimate_tokens(_text_of(item)) for item in items],
        PromptPrefix(messages[:count], _FIELD),
        PromptSuffix(messages=messages[count:]),
        put,
        field=_FIELD,
    )


def _in_blocks(body: MessagesBody) -> NativeDocuments | None:
    messages = body.prefix().messages
    before = dict.fromkeys(_PLACES, 0)
    for place, raw in enumerate(messages):
        message = decode(raw, _Part) or _Part()
        parts = decode(message.content, list[Raw]) or []
        number = 0
        for kind, group in groupby(parts, _kind_of):
            blocks = list(group)
            if kind in _PLACES and len(blocks) > 1 and decode(message.role, str) == "user":
                text = BOUNDARY.join(map(_text_of, blocks))
                passage = Passage(text, messages, place, parts=parts, number=number)
                cited = (_PLACES[kind], before[kind])
                prefix = PromptPrefix(messages[:place], "user", parts[:number])
                suffix = PromptSuffix("", parts[number + len(blocks) :], messages[place + 1 :])
                lengths = [_length_of(each) for each in blocks]
                return NativeDocuments(
                    blocks, lengths, prefix, suffix, _putter(body, passage, blocks, cited), passage, cited
                )
            number += len(blocks)
            for each in blocks:
                for inner in _kinds_in(each, kind):
                    before[inner] += 1
    return None


def _putter(body: MessagesBody, passage: Passage, blocks: Sequence[Raw], cited: tuple[str, int]) -> Put:
    def put(ordered: Sequence[Raw], permutation: Sequence[int]) -> None:
        name, first = cited
        places = {first + rank: first + place for place, rank in enumerate(permutation)}
        path = [*_CITATIONS, name]
        parts = list(passage.parts)
        parts[passage.number : passage.number + len(blocks)] = ordered
        own = msgspec.json.decode(passage.messages[passage.place], type=Fields)
        changed = {passage.place: encode(own | {"content": parts})}
        for number, raw in enumerate(passage.messages[passage.place + 1 :], passage.place + 1):
            # Earlier answers cite by the client's places.
            if name.encode() in bytes(raw):
                changed[number] = _translate(raw, path, places)
        body.put_messages(changed)

    return put


def documents_in_parts(body: ChatBody, template: DocumentTemplate) -> NativeDocuments | None:
    """Return documents that are content parts, with the pictures after them. Parts that differ only in texts are one
    passage instead."""
    messages = body.prefix().messages
    for place, raw in enumerate(messages):
        message = decode(raw, _Part) or _Part()
        # A decoder takes longer to refuse a text.
        parts = decode(message.content, list[Raw]) or [] if bytes(message.content)[:1] == b"[" else []
        if len(parts) < 2 or not template.reads(decode(message.role, str) or ""):
            continue
        texts = [_text_in(part) for part in parts]
        if None not in texts and not _differ(parts):
            continue
        are_documents = [text is not None and template.is_one(text) for text in texts]
        number = 0
        while number < len(parts):
            units: list[list[Raw]] = []
            first = number
            while number < len(parts) and are_documents[number]:
                end = next((n for n in range(number + 1, len(parts)) if texts[n] is not None), len(parts))
                units.append(parts[number:end])
                number = end
            units = _clear_units(units)
            if len(units) > 1:
                return _in_parts(body, messages, place, parts, first, units)
            number += not units
    return None


def _clear_units(units: list[list[Raw]]) -> list[list[Raw]]:
    """Return the documents with clear pictures: those after the last one may be the question's."""
    if any(_MARKS.intersection(decode(part, Fields) or ()) for unit in units for part in unit):
        return []
    pictures = {len(unit) for unit in units}
    if pictures == {1}:
        return units if _differ([part for (part,) in units]) else []
    if len(pictures) > 1 and len(units[-1]) > 1:
        return [*units[:-1], units[-1][:1]] if {len(unit) for unit in units[:-1]} == {1} else units[:-1]
    return units


def _differ(parts: Sequence[Raw]) -> bool:
    attributes = [(decode(part, Fields) or {}) | {"text": _NULL} for part in parts]
    return any(each != attributes[0] for each in attributes)


def _in_parts(
    body: ChatBody,
    messages: Sequence[Raw],
    place: int,
    parts: Sequence[Raw],
    first: int,
    units: Sequence[Sequence[Raw]],
) -> NativeDocuments:
    count = sum(map(len, units))

    def put(ordered: Sequence[Raw], permutation: Sequence[int]) -> None:
        moved = [part for unit in ordered for part in msgspec.json.decode(unit, type=list[Raw])]
        own = msgspec.json.decode(messages[place], type=Fields)
        body.put_messages({place: encode(own | {"content": [*parts[:first], *moved, *parts[first + count :]]})})

    items = [encode(unit) for unit in units]
    text = BOUNDARY.join(map(_text_of, items))
    role = _role_of(messages[place])
    return NativeDocuments(
        items,
        [estimate_tokens(_text_in(unit[0]) or "") for unit in units],
        PromptPrefix(messages[:place], role, parts[:first]),
        PromptSuffix("", parts[first + count :], messages[place + 1 :]),
        put,
        Passage(text, messages, place, role, parts, first),
    )


def _text_in(part: Raw) -> str | None:
    return decode((decode(part, _Part) or _Part()).text, str)


def _text_of(item: Raw) -> str:
    return bytes(item).decode("utf-8", "replace")


def _length_of(block: Raw) -> int:
    length = estimate_tokens(_text_of(block))
    source = decode((decode(block, _Part) or _Part()).source, _Part) or _Part()
    return length * 4 // _FILE_CHARACTERS if decode(source.type, str) == "base64" else length


def _kind_of(part: Raw) -> str:
    return decode((decode(part, _Part) or _Part()).type, str) or ""


def _kinds_in(part: Raw, kind: str) -> Iterator[str]:
    if kind in _PLACES:
        yield kind
    elif kind == "tool_result":
        block = decode(part, _Part) or _Part()
        yield from (inner for each in decode(block.content, list[Raw]) or [] if (inner := _kind_of(each)) in _PLACES)


def _role_of(raw: Raw) -> str:
    return decode((decode(raw, _Part) or _Part()).role, str) or ""


class CitationTranslator:
    """Translates citations from places in the sent order to the client's. A stream's other events keep their bytes."""

    def __init__(self, name: str, places: Mapping[int, int]) -> None:
        self._name = name
        self._places = places
        self._is_stream = False
        self._held = bytearray()

    def begin(self, headers: Headers) -> Headers:
        if encoding_of(headers) is not None:
            raise _unreadable("is compressed")
        self._is_stream = (header(headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
        return without(headers, b"content-length")

    def feed(self, chunk: bytes) -> bytes:
        self._held += chunk
        if len(self._held) > _MOST_ANSWER:
            raise _unreadable("is too long")
        if not self._is_stream:
            return b""
        lines = bytes(self._held).splitlines(keepends=True)
        self._held.clear()
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._held += lines.pop()
        return b"".join(map(self._line, lines))

    def end(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return self._line(held) if self._is_stream else self._whole(held)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or self._name.encode() not in line:
            return line
        event = received = Raw(line[5:])
        for path in _EVENT_CITATIONS:
            event = _translate(event, [*path, self._name], self._places)
        if event is received:
            return line
        return b"data: " + bytes(event) + line[len(line.rstrip(b"\r\n")) :]

    def _whole(self, content: bytes) -> bytes:
        if self._name.encode() not in content:
            return content
        return bytes(_translate(Raw(content), [*_CITATIONS, self._name], self._places))


# Paths of citations, with None for each item of a list: in a message or an answer, and in a stream's events.
_CITATIONS = ("content", None, "citations", None)
_EVENT_CITATIONS = (("delta", "citation"), ("content_block", "citations", None))


def _translate(raw: Raw, path: Sequence[str | None], places: Mapping[int, int]) -> Raw:
    """Return JSON with other places at the end of a path. All else keeps its bytes: a decoder refuses some numbers."""
    if not path:
        place = decode(raw, int)
        return raw if place is None or place not in places else encode(places[place])
    name, *rest = path
    if name is None:
        items = decode(raw, list[Raw])
        return encode([_translate(each, rest, places) for each in items]) if items else raw
    fields = decode(raw, Fields)
    if not fields or name not in fields:
        return raw
    return encode(fields | {name: _translate(fields[name], rest, places)})


def _unreadable(what: str) -> HTTPError:
    message = f"The upstream server's answer {what}, so its citations cannot be translated to the client's documents."
    return HTTPError(502, message, code="upstream_unavailable")
