"""Recognition of documents in a text, by the template that they were written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import NamedTuple

from ragorder.adapters.proxy.body import BOUNDARY

__all__ = ["DocumentRun", "DocumentTemplate", "TemplateError"]

_FIELDS = ("id", "text", "title")


class TemplateError(ValueError):
    """By such a template no document can be found again. The message says what to change."""


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Documents that stand one behind the other in a text: `pieces` are the text cut up, in front of the first
    document, then documents and the white space between them by turns, and what stands behind the last."""

    pieces: Sequence[str]

    @property
    def head(self) -> str:
        """What stands in front of the first document."""
        return self.pieces[0]

    @property
    def documents(self) -> Sequence[str]:
        """The documents as they stand in the text, header and all."""
        return self.pieces[1::2]

    @property
    def gaps(self) -> Sequence[str]:
        """The white space between the documents."""
        return self.pieces[2:-1:2]

    @property
    def tail(self) -> str:
        """What stands behind the last document."""
        return self.pieces[-1]

    def filled(self, documents: Sequence[str]) -> str:
        """The text with other documents in the places of its own."""
        pieces = list(self.pieces)
        pieces[1::2] = documents
        return "".join(pieces)

    def arranged(self, permutation: Sequence[int]) -> str:
        """The text with its documents in another order; `permutation` says which of them stands at each place."""
        documents = self.documents
        return self.filled([documents[place] for place in permutation])


# Start and end. A plain pair of numbers is nothing to the garbage collector, which stops every thread to look at the
# hundred thousands of them that a hostile text has.
_Span = tuple[int, int]


class DocumentParts(NamedTuple):
    """A document cut up: what stands in front of its id, that, and what stands behind it."""

    before: str
    id: str
    after: str

    @property
    def rest(self) -> str:
        """The document without its id."""
        return self.before + self.after

    def under(self, id: str) -> str:
        """The document with another id."""
        return self.before + id + self.after


class DocumentTemplate:
    """How one document stands in a message: `<document id="{id}">\\n{text}\\n</document>`, with {text} and, if wanted,
    {id} and {title}; a literal brace is written twice. White space around the template does not matter.

    Documents are found by the marks in front of and behind them. Where marks do not take turns (a document's text has
    one in it, or something else in the message has), the documents next to them are left where they are. Between two
    of them may be white space, and the end of a part of the message (`BOUNDARY`); in none of them may be that.

    Raises TemplateError.
    """

    def __init__(self, template: str) -> None:
        self._fields, (self._open, *self._between, self._close) = _parse(template.strip())
        for mark, side in ((self._open, "in front of"), (self._close, "behind")):
            if not mark.strip():
                raise TemplateError(f"something visible must stand {side} a document's fields, to tell where it is")
        if not all(self._between):
            raise TemplateError("something must stand between two fields, to tell where one ends")
        if self._open in self._close or self._close in self._open:
            raise TemplateError(
                "what stands in front of a document and what stands behind it must not be part of one another"
            )
        sample = self._open + "".join(f"1{literal}" for literal in (*self._between, self._close))
        run = self.find(f"{sample}{sample}{sample}")
        if run is None or list(run.documents) != [sample] * 3:
            raise TemplateError("three documents in a row are not found again: choose marks that cannot be mistaken")

    def find(self, text: str) -> DocumentRun | None:
        """The longest run of two or more documents, the first of equals; None if there is none. Takes linear time."""
        longest: list[_Span] = []
        run: list[_Span] = []
        for start, end in self._documents(text):
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
        """Whether there is any document in a text."""
        return next(self._documents(text), None) is not None

    @property
    def shows_id(self) -> bool:
        """Whether a document's id stands in it."""
        return "id" in self._fields

    def named(self, document: str) -> DocumentParts:
        """A document, as it stands in a text, with its id taken out of it."""
        if not self.shows_id:
            return DocumentParts(document, "", "")
        place = self._id_in(document)
        return DocumentParts(document[: place.start], document[place], document[place.stop :])

    def _id_in(self, document: str) -> slice:
        # A text may have in it what stands between fields: a field in front of it is looked for from the front, one
        # behind it from behind, so that nothing of the text is taken for the id.
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

    def _documents(self, text: str) -> Iterator[_Span]:
        """Each opening mark with the closing mark behind it, if neither is doubled: no opening mark between them, no
        closing mark behind them that could be the real one."""
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
    """The fields of a template, and what stands in front of, between and behind them."""
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
            raise TemplateError("a template has {text} and may have {id} and {title}, and no other field")
        fields.append(field)
        literals.append("")
    if "text" not in fields or len(set(fields)) < len(fields):
        raise TemplateError("a template has {text} once, and {id} and {title} at most once")
    return fields, literals
