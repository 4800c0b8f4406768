"""Recognition of documents in a text by their template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import NamedTuple

from ragorder.adapters.proxy.bodies.body import BOUNDARY
from ragorder.errors import RagorderError

__all__ = ["DocumentRun", "DocumentTemplate", "TemplateError", "are_places", "numbered_by_place"]

_FIELDS = ("id", "text", "title")
# An id directly after one of these ends at its counterpart.
_CLOSING = {'"': '"', "'": "'", "`": "`", "[": "]", "(": ")", "{": "}", "<": ">"}
# A number that ends there: `1. Manual`, `1 (manual.pdf)`, but not `1-a`, `1.2` or `1st`.
_NUMBER = re.compile(r"""\s*([0-9]{1,4})(?=\.?(?:\s|$)|[])}>,;:|"'])""")


class TemplateError(RagorderError, ValueError):
    """The template cannot recognise documents. The message says what to change."""


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Consecutive documents in a text. `pieces` alternate: head, document, gap, document, …, tail."""

    pieces: Sequence[str]

    @property
    def head(self) -> str:
        return self.pieces[0]

    @property
    def documents(self) -> Sequence[str]:
        return self.pieces[1::2]

    @property
    def gaps(self) -> Sequence[str]:
        return self.pieces[2:-1:2]

    @property
    def tail(self) -> str:
        return self.pieces[-1]

    def filled(self, documents: Sequence[str]) -> str:
        return "".join(self.pieces_with(documents))

    def pieces_with(self, documents: Sequence[str]) -> list[str]:
        pieces = list(self.pieces)
        pieces[1::2] = documents
        return pieces

    def arranged(self, permutation: Sequence[int]) -> str:
        documents = self.documents
        return self.filled([documents[place] for place in permutation])


# Start and end. The garbage collector does not track plain pairs of numbers; a hostile text has hundreds of thousands,
# and scanning them would stop every thread.
_Span = tuple[int, int]


class DocumentParts(NamedTuple):
    before: str
    id: str
    after: str

    @property
    def rest(self) -> str:
        return self.before + self.after

    def with_id(self, id: str) -> str:
        return self.before + id + self.after

    def at_number(self) -> DocumentParts:
        found = _NUMBER.match(self.id)
        if found is None:
            return self
        start, end = found.span(1)
        return DocumentParts(self.before + self.id[:start], found[1], self.id[end:] + self.after)


def are_places(ids: Sequence[str]) -> bool:
    """Return whether ids number positions, from 1; numbers that several documents share do not."""
    return all(id == str(place) for place, id in enumerate(ids, 1))


def numbered_by_place(documents: Sequence[DocumentParts]) -> list[DocumentParts] | None:
    """Return the documents split at their numbers, or None if these do not number positions."""
    split = [each.at_number() for each in documents]
    return split if are_places([each.id for each in split]) else None


class DocumentTemplate:
    r"""Form of one document in a message, such as `<document id="{id}">\n{text}\n</document>`: {text} and optionally
    {id} and {title}; a literal brace is written twice.

    Documents are recognised by the texts before and after them, which must alternate; white space and `BOUNDARY` may
    separate documents. `form` is the template itself. Raises TemplateError."""

    def __init__(self, template: str) -> None:
        self.form = template.strip()
        self._fields, (self._open, *self._between, self._close) = _parse(self.form)
        for mark, side in ((self._open, "before"), (self._close, "after")):
            if not mark.strip():
                raise TemplateError(
                    f"a template needs visible text {side} its fields, to mark where a document begins and ends"
                )
        if not all(self._between):
            raise TemplateError("a template needs text between two fields, to mark where one ends")
        if self._open in self._close or self._close in self._open:
            raise TemplateError("the text before a document and the text after it must not contain each other")
        sample = self._open + "".join(f"1{literal}" for literal in (*self._between, self._close))
        run = self.find(f"{sample}{sample}{sample}")
        if run is None or list(run.documents) != [sample] * 3:
            raise TemplateError(
                "three adjacent documents are not recognised: choose other text before and after the fields"
            )

    def find(self, text: str) -> DocumentRun | None:
        """Return the first of the longest runs of at least two documents, or None, in linear time."""
        longest: list[_Span] = []
        run: list[_Span] = []
        for start, end in self.spans(text):
            if run and _is_blank(text, run[-1][1], start):
                run.append((start, end))
            else:
                run = [(start, end)]
            if len(run) > len(longest):
                longest = run
        if len(longest) < 2:
            return None
        edges = [0, *(edge for span in longest for edge in span), len(text)]
        return DocumentRun([text[start:end] for start, end in pairwise(edges)])

    def has_one(self, text: str) -> bool:
        return next(self.spans(text), None) is not None

    @property
    def shows_id(self) -> bool:
        return "id" in self._fields

    def split_at_id(self, document: str) -> DocumentParts:
        if not self.shows_id:
            return DocumentParts(document, "", "")
        place = self._id_in(document)
        start, end = place.start, place.stop
        closing = _CLOSING.get(document[start - 1])
        if closing is not None and (closed_at := document.find(closing, start, end)) >= 0:
            # The tag has more than the template shows: the template's next text comes later.
            end = closed_at
        return DocumentParts(document[:start], document[start:end], document[end:])

    def _id_in(self, document: str) -> slice:
        # A document's text may contain the separator of fields: a field before the text is searched from the start, one
        # after it from the end, so that the text is never mistaken for the id.
        start, end = len(self._open), len(document) - len(self._close)
        place = self._fields.index("id")
        if place < self._fields.index("text"):
            for literal in self._between[:place]:
                start = document.find(literal, start, end) + len(literal)
            return slice(start, document.find(self._between[place], start, end))
        for literal in reversed(self._between[place:]):
            end = document.rfind(literal, start, end)
        literal = self._between[place - 1]
        return slice(document.rfind(literal, start, end) + len(literal), end)

    def spans(self, text: str) -> Iterator[_Span]:
        opened_at = text.find(self._open)
        while opened_at >= 0:
            inside = opened_at + len(self._open)
            closed_at = text.find(self._close, inside)
            if closed_at < 0:
                return
            end = closed_at + len(self._close)
            next_opened_at = text.find(self._open, end)
            until = len(text) if next_opened_at < 0 else next_opened_at
            doubled = text.find(self._open, inside, closed_at) >= 0 or text.find(self._close, end, until) >= 0
            broken = text.find(BOUNDARY, inside, closed_at) >= 0
            if not doubled and not broken and self._has_fields(text, inside, closed_at):
                yield opened_at, end
            opened_at = next_opened_at

    def _has_fields(self, text: str, start: int, end: int) -> bool:
        for literal in self._between:
            start = text.find(literal, start, end)
            if start < 0:
                return False
            start += len(literal)
        return True


def _is_blank(text: str, start: int, end: int) -> bool:
    between = text[start:end].replace(BOUNDARY, "")
    return not between or between.isspace()


def _parse(template: str) -> tuple[list[str], list[str]]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(f"{error}; a literal brace is written twice") from None
    literals, fields = [""], []
    for literal, field, form, conversion in parts:
        literals[-1] += literal
        if field is None:
            continue
        if field not in _FIELDS or form or conversion:
            raise TemplateError("a template has {text}, optionally {id} and {title}, and no other field")
        fields.append(field)
        literals.append("")
    if "text" not in fields or len(set(fields)) < len(fields):
        raise TemplateError("a template has {text} once, and {id} and {title} at most once")
    return fields, literals
