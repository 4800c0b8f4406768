"""Documents found again in a text, by the template that they were written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import NamedTuple

__all__ = ["DocumentTemplate", "Run", "TemplateError"]

_FIELDS = ("id", "text", "title")


class TemplateError(ValueError):
    """By such a template no document can be found again. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Run:
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

    def arranged(self, permutation: Sequence[int]) -> str:
        """The text with its documents in another order; `permutation` says which of them stands at each place."""
        pieces, documents = list(self.pieces), self.documents
        pieces[1::2] = [documents[place] for place in permutation]
        return "".join(pieces)


class DocumentTemplate:
    """How one document stands in a message: `<document id="{id}">\\n{text}\\n</document>`, with {text} and, if wanted,
    {id} and {title}; a literal brace is written twice. White space around the template does not matter.

    Documents are found by the marks in front of and behind them. Where marks do not take turns (a document's text has
    one in it, or something else in the message has), the documents next to them are left where they are. A document
    moves as it stands: whatever number its header gives it, it keeps.

    Raises TemplateError.
    """

    def __init__(self, template: str) -> None:
        self._open, *self._between, self._close = _literals(template.strip())
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

    def find(self, text: str) -> Run | None:
        """The longest run of two or more documents, the first of equals; None if there is none. Takes linear time."""
        longest: list[_Span] = []
        run: list[_Span] = []
        for span in self._documents(text):
            if run and _is_blank(text, run[-1].end, span.start):
                run.append(span)
            else:
                run = [span]
            if len(run) > len(longest):
                longest = run
        if len(longest) < 2:
            return None
        edges = [0, *(edge for span in longest for edge in span), len(text)]
        return Run([text[start:end] for start, end in pairwise(edges)])

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
            if not doubled and self._has_fields(text, inside, closed_at):
                yield _Span(opened_at, end)
            opened_at = next_opened_at

    def _has_fields(self, text: str, start: int, end: int) -> bool:
        for literal in self._between:
            start = text.find(literal, start, end)
            if start < 0:
                return False
            start += len(literal)
        return True


class _Span(NamedTuple):
    start: int
    end: int


def _is_blank(text: str, start: int, end: int) -> bool:
    return start == end or text[start:end].isspace()


def _literals(template: str) -> list[str]:
    """What stands in front of, between and behind the fields of a template."""
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
    return literals
