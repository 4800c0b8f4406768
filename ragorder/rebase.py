"""Rebased conversations: all documents before the first question, other words unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragorder.document import Document

__all__ = ["DocumentInMessage", "Layout", "read_earlier", "rebase_messages"]

_BEARERS = ("user", "tool")


@dataclass(frozen=True, slots=True)
class DocumentInMessage:
    """A document in a message: its whole `text`, which begins with its `header`, and the line that names it,
    `named`."""

    document: Document
    text: str
    header: str
    named: str

    @property
    def movable(self) -> bool:
        """Whether it can be distinguished from a part of another document."""
        return bool(self.text.strip() and self.header.strip()) and self.text.startswith(self.header)


@dataclass(frozen=True, slots=True)
class Layout:
    """A rebased conversation: its `documents`, removed from `messages` and named where they were, except in the first
    message.

    They belong before that message's content, after the `system` prompt if it has no message of its own.
    """

    documents: list[Document]
    system: str
    messages: list[dict[str, Any]]


def read_earlier(documents: Iterable[Document]) -> list[Document]:
    """Raise TypeError for objects that are not documents."""
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
    """Return all documents `asked` for now and those of `earlier` turns in the messages, together.

    `system` opens the first message if it has no message of its own. A document is followed by one of `openings`
    (empty: by any text), and stays if another version of it does. Returns None if there is nothing to move, or if a
    document asked for would have to stay.
    """
    first = messages[0].get("content")
    if messages[0].get("role") != "user" or not isinstance(first, str) or not first.startswith(system):
        return None
    known: dict[str, DocumentInMessage] = {}
    for each in (*asked, *earlier):
        if each.movable:
            known.setdefault(each.text, each)
    contents: list[str | None] = [
        message["content"] if message.get("role") in _BEARERS and isinstance(message.get("content"), str) else None
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
    """Return the longest document at this place; a shorter one may be its beginning."""
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
    """Return whether the text has the document's header, except in the line that names it."""
    place = text.find(standing.header)
    while place >= 0:
        if not text.startswith(standing.named, place):
            return True
        place = text.find(standing.header, place + 1)
    return False
