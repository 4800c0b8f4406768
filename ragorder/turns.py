"""Making of a conversation's next turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from ragorder.common.counts import Estimate
from ragorder.conversation import (
    Message,
    MessageFormat,
    Repeat,
    Turn,
    digest_of,
    name_in,
    opening_of,
    read_history,
    segments_of,
    texts_of,
)
from ragorder.document import Document
from ragorder.ordering import Ordering
from ragorder.protocols import OrdersTurns
from ragorder.trie.histories import History, Segment

_MESSAGES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class DocumentInMessage:
    """A document in a message: its whole `text`, which begins with its `header`, and the line `named`."""

    document: Document
    text: str
    header: str
    named: str

    @property
    def movable(self) -> bool:
        return bool(self.text.strip() and self.header.strip()) and self.text.startswith(self.header)


@dataclass(frozen=True, slots=True)
class Layout:
    """A rebased conversation: `documents` removed from `messages`, and named except in the first message.

    They belong before that message's content, after `system` if the system prompt has no message of its own.
    """

    documents: list[Document]
    system: str
    messages: list[dict[str, Any]]


def read_earlier(documents: Iterable[Document]) -> list[Document]:
    wanted = "rebase must hold the documents of earlier turns (ragorder.Document), or be None"
    if isinstance(documents, bool) or not isinstance(documents, Iterable):
        raise TypeError(f"{wanted}, got {documents!r}")
    earlier = list(documents)
    for each in earlier:
        if not isinstance(each, Document):
            raise TypeError(f"{wanted}, got {type(each).__name__}")
    return earlier


def rebase_messages(
    messages: Sequence[Mapping[str, Any]],
    asked: Sequence[DocumentInMessage],
    earlier: Sequence[DocumentInMessage],
    *,
    system: str,
    openings: tuple[str, ...],
) -> Layout | None:
    """Put together all documents `asked` for now and those of `earlier` turns in the messages.

    One of `openings` follows each document. Return None if nothing moves, or if a document asked for would stay.
    """
    first = messages[0].get("content")
    if messages[0].get("role") != "user" or not isinstance(first, str) or not first.startswith(system):
        return None
    known: dict[str, DocumentInMessage] = {}
    for each in (*asked, *earlier):
        if each.movable:
            known.setdefault(each.text, each)
    contents: list[str | None] = [
        message["content"] if message.get("role") in _MESSAGES and isinstance(message.get("content"), str) else None
        for message in messages
    ]
    contents[0] = first[len(system) :]
    runs = [None if content is None else _Run(content, list(known.values()), openings) for content in contents]
    standing = {each.text for run in runs if run is not None for each in run.documents}
    moved = standing | {each.text for each in asked}
    while True:
        texts = [*_others(messages, contents), *(run.without(moved) for run in runs if run is not None)]
        headers = Counter(each.header for each in known.values() if each.text in moved)
        kept = {
            each.text
            for each in known.values()
            if each.text in moved and (headers[each.header] > 1 or any(_opens(each, text) for text in texts))
        }
        if not kept:
            break
        moved -= kept
    if not moved & standing or not all(each.movable and each.text in moved for each in asked):
        return None
    rebased = []
    for message, run in zip(messages, runs, strict=True):
        content = message.get("content")
        if run is not None:
            content = run.without(moved) if message is messages[0] else run.named(moved) + run.without(moved)
        rebased.append({**message, "content": content} if "content" in message else dict(message))
    return Layout([each.document for each in known.values() if each.text in moved], system, rebased)


class _Run:
    def __init__(self, content: str, known: Sequence[DocumentInMessage], openings: tuple[str, ...]) -> None:
        self.documents: list[DocumentInMessage] = []
        end = 0
        while (found := _at(content, end, known, openings)) is not None:
            self.documents.append(found)
            end += len(found.text)
        self.rest = content[end:]

    def without(self, moved: set[str]) -> str:
        return "".join(each.text for each in self.documents if each.text not in moved) + self.rest

    def named(self, moved: set[str]) -> str:
        return "".join(each.named for each in self.documents if each.text in moved)


def _at(
    content: str, place: int, known: Sequence[DocumentInMessage], openings: tuple[str, ...]
) -> DocumentInMessage | None:
    found: DocumentInMessage | None = None
    for each in known:
        end = place + len(each.text)
        whole = end == len(content) or not openings or content.startswith(openings, end)
        if whole and content.startswith(each.text, place) and (found is None or len(each.text) > len(found.text)):
            found = each
    return found


def _others(messages: Sequence[Mapping[str, Any]], contents: Sequence[str | None]) -> Iterator[str]:
    for message, content in zip(messages, contents, strict=True):
        parts = message.get("content") if content is None and message.get("role") != "assistant" else None
        if isinstance(parts, str):
            yield parts
        elif isinstance(parts, Sequence):
            yield from (str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


def _opens(standing: DocumentInMessage, text: str) -> bool:
    place = text.find(standing.header)
    while place >= 0:
        if not text.startswith(standing.named, place):
            return True
        place = text.find(standing.header, place + 1)
    return False


_BEARERS = ("user", "tool", "system", "developer", "function")


def make_turn(
    form: MessageFormat,
    question: str,
    documents: Iterable[Document],
    history: Iterable[Message],
    orderer: OrdersTurns,
    *,
    repeat: Repeat,
    reference: str,
    tool_call_id: str | None,
    rebase: Iterable[Document] | None = None,
    **options: Any,
) -> Turn:
    if repeat not in ("name", "send"):
        raise ValueError(f"repeat must be 'name' or 'send', got {repeat!r}")
    if rebase is not None and repeat != "name":
        raise ValueError("rebase names the documents of all turns: it needs repeat='name'")
    _check_reference(reference)
    earlier = None if rebase is None else read_earlier(rebase)
    given = list(documents)
    messages, front = read_history(history, form)
    if tool_call_id is not None and not messages:
        raise ValueError("a tool's result follows its call: give history=[…, the assistant's message with the call]")
    text = form.question(question, given) if tool_call_id is None else ""
    maker = _TurnMaker(form, orderer, reference, tool_call_id, options, front, messages)
    return maker.make(text, given, earlier, names=repeat == "name")


@dataclass(frozen=True, slots=True)
class _Place:
    documents: list[Document]
    history: History


@dataclass(frozen=True, slots=True)
class _TurnMaker:
    form: MessageFormat
    orderer: OrdersTurns
    reference: str
    tool_call_id: str | None
    options: dict[str, Any]
    front: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def make(self, text: str, given: list[Document], earlier: list[Document] | None, *, names: bool) -> Turn:
        """`earlier`: documents of former turns, to rebase."""
        form = self.form
        named: list[Document] = self._repeated(given) if names and self.messages else []
        held = set(map(id, named))
        asked = self._names(named) + text
        new = [each for each in given if id(each) not in held]
        if new:
            question = Segment(digest_of(asked), self._length(asked))
        else:
            # The key that the question has in a rebased conversation.
            (question,) = segments_of([self._message(form.escape(asked))], form)
        place = _Place(new, History(segments_of(self.messages, form), question))
        if earlier is not None and self.orderer.has_lost(place.history, scope=self.options.get("scope")):
            turn = self._rebase(text, given, earlier, place)
            if turn is not None:
                return turn
        ordering = self._order(place)
        try:
            content = self._content(ordering, asked)
            if not self.messages and self._system:
                content = _prepend(self._system, content)
            messages = [*self.front, *self.messages, self._message(content)]
            return Turn(messages, ordering, named, False, form.closing_tokens, len(self.front))
        except BaseException:
            ordering.discard()
            raise

    def _rebase(self, text: str, given: list[Document], earlier: list[Document], appended: _Place) -> Turn | None:
        form = self.form
        asked, before = (list(map(self._in_message, documents)) for documents in (given, earlier))
        layout = rebase_messages(self.messages, asked, before, system=self._system, openings=self._openings)
        if layout is None:
            return None
        first, *others = [*layout.messages, self._message(form.escape(self._names(given) + text))]
        rest = first["content"]
        follows = [Segment(digest_of(rest), self._length(rest)), *segments_of(others, form)]
        place = _Place(layout.documents, History(question=follows))
        if self._computed_tokens(place) >= self._computed_tokens(appended):
            return None
        ordering = self._order(place)
        try:
            content = form.escape("".join(map(form.document_text, ordering.documents)) + rest)
            if not content.endswith(rest):
                # A document's end and the question's beginning form a special token.
                ordering.discard()
                return None
            messages = [*self.front, {**first, "content": f"{self._system}{content}"}, *others]
            return Turn(messages, ordering, given, True, form.closing_tokens, len(self.front), len(self.front))
        except BaseException:
            ordering.discard()
            raise

    @property
    def _system(self) -> str:
        form = self.form
        return f"{form.system}\n\n" if form.system and not form.system_role else ""

    @property
    def _openings(self) -> tuple[str, ...]:
        openings = (*self.form.openings, opening_of(self.reference))
        return openings if all(openings) else ()

    def _content(self, ordering: Ordering[Document], asked: str) -> str | list[dict[str, Any]]:
        form, texts = self.form, list(map(self.form.document_text, ordering.documents))
        if ordering.cloud is None or ordering.cloud.model.rules.resume != "marks":
            return form.escape("".join(texts) + asked)
        from ragorder.clouds import PromptParts, openai_content

        return openai_content(PromptParts("", texts, asked, escape=form.escape).texts()) or ""

    def _message(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        if self.tool_call_id is None:
            return {"role": "user", "content": content}
        return {"role": "tool", "tool_call_id": self.tool_call_id, "content": content}

    def _order(self, place: _Place) -> Ordering[Document]:
        return self.orderer.order(place.documents, history=place.history, **self.options)

    def _computed_tokens(self, place: _Place) -> int:
        cached_tokens, end = self.orderer.predict_cached_tokens(
            place.documents, scope=self.options.get("scope"), history=place.history
        )
        return end - cached_tokens

    def _length(self, text: str) -> int:
        tokens = self.form.count(text) + self.form.turn_tokens
        return Estimate(tokens) if self.form.estimated else tokens

    def _names(self, documents: Iterable[Document]) -> str:
        return "".join(name_in(self.reference, each) for each in documents)

    def _repeated(self, given: Sequence[Document]) -> list[Document]:
        bearers = [message for message in self.messages if message.get("role") in _BEARERS]
        texts = [text for message in bearers for text in texts_of(message)]
        openings = self._openings
        return [each for each in given if _appears_in(self.form, each, self.reference, texts, openings)]

    def _in_message(self, document: Document) -> DocumentInMessage:
        form = self.form
        texts = form.document_text(document), form.header(document), name_in(self.reference, document)
        return DocumentInMessage(document, *map(form.escape, texts))


def _appears_in(
    form: MessageFormat, document: Document, reference: str, texts: Sequence[str], openings: tuple[str, ...]
) -> bool:
    text, name = form.escape(form.document_text(document)), form.escape(name_in(reference, document))
    header = form.escape(form.header(document))
    # Without a header the text may be a part of another document.
    if not text.strip() or not header.strip() or not text.startswith(header):
        return False
    for content in reversed(texts):
        place = content.rfind(header)
        # Skip places where the document is only named; its text is further above.
        while place >= 0 and content.startswith(name, place) and not content.startswith(text, place):
            place = content.rfind(header, 0, place + len(header) - 1)
        if place >= 0:
            end = place + len(text)
            whole = end == len(content) or not openings or content.startswith(openings, end)
            return whole and content.startswith(text, place)
    return False


@lru_cache(maxsize=64)
def _check_reference(reference: str) -> None:
    try:
        fields = {name for _, name, *_ in Formatter().parse(reference) if name is not None}
        reference.format(id="", title="")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"reference: {error}; it may use {{id}} and {{title}}") from None
    if "id" not in fields and "title" not in fields:
        raise ValueError(f"reference must name the document by {{id}} or {{title}}: {reference!r}")


def _prepend(text: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return text + content
    return [content[0] | {"text": text + content[0]["text"]}, *content[1:]]
