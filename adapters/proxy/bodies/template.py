"""Recognition of documents by their template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from string import Formatter
from typing import NamedTuple

from ragorder.adapters.proxy.bodies.body import BOUNDARY
from ragorder.errors import RagorderError

START, END = "{start}", "{end}"
_FIELDS = ("id", "n", "text", "title", "*")
_DIGITS = re.compile(r"[0-9]{1,4}")
_LINE_BREAKS = ("\n", BOUNDARY)
# Most characters between two documents, marks included: the search stays linear.
_LONGEST_MARK = 4096
# An id directly after one of these ends at its counterpart.
_CLOSING = {'"': '"', "'": "'", "`": "`", "[": "]", "(": ")", "{": "}", "<": ">"}
# A number that ends there: `1. Manual`, `1 (manual.pdf)`, but not `1-a`, `1.2` or `1st`.
_NUMBER = re.compile(r"""\s*([0-9]{1,4})(?=\.?(?:\s|$)|[])}>,;:|"'])""")


class TemplateError(RagorderError, ValueError):
    """The template cannot recognise documents: the message says what to change."""


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Consecutive documents: `pieces` are head, document, gap, document, …, tail."""

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

    def pieces_with(self, documents: Sequence[str]) -> list[str]:
        pieces = list(self.pieces)
        pieces[1::2] = documents
        return pieces


# Start and end. The garbage collector does not track plain pairs of numbers; a hostile text has hundreds of thousands,
# and scanning them would stop every thread.
_Span = tuple[int, int]


class DocumentParts(NamedTuple):
    """A document's text around its id, or its number, which may occur several times."""

    pieces: tuple[str, ...]
    id: str

    @property
    def rest(self) -> str:
        return "".join(self.pieces)

    def with_id(self, id: str) -> str:
        return id.join(self.pieces)

    def at_number(self) -> DocumentParts:
        found = _NUMBER.match(self.id) if len(self.pieces) == 2 else None
        if found is None:
            return self
        start, end = found.span(1)
        before, after = self.pieces
        return DocumentParts((before + self.id[:start], self.id[end:] + after), found[1])


def are_places(ids: Sequence[str], first: int = 1) -> bool:
    """Return whether ids number positions."""
    return all(id == str(place) for place, id in enumerate(ids, first))


def numbered_by_place(documents: Sequence[DocumentParts], *, from_0: bool = False) -> list[DocumentParts] | None:
    """Split documents at their numbers; return None if these do not number positions from 1 (or 0)."""
    split = [each.at_number() for each in documents]
    ids = [each.id for each in split]
    return split if are_places(ids) or (from_0 and are_places(ids, 0)) else None


class _Mark:
    """Text before or after a document's text: `literals` with a field between each two. Its key, by which it is found,
    ends at the first field that is no number."""

    def __init__(self, literals: Sequence[str], fields: Sequence[str]) -> None:
        self.literals = list(literals)
        self.fields = list(fields)
        keyed = next((place for place, field in enumerate(fields) if field != "n"), len(fields))
        self._numbers = list(zip(fields[:keyed], literals[1 : keyed + 1], strict=True))

    @property
    def is_visible(self) -> bool:
        return any(literal.strip() for literal in self.literals)

    def followed_by(self, between: str, other: _Mark) -> _Mark:
        seam = self.literals[-1] + between + other.literals[0]
        return _Mark([*self.literals[:-1], seam, *other.literals[1:]], [*self.fields, *other.fields])

    def find(self, text: str, start: int, end: int) -> int:
        """Return where the next key begins, or -1 as `str.find`."""
        at = text.find(self.literals[0], start, end)
        while at >= 0 and self._numbers and self.end_of_key(text, at, end) is None:
            at = text.find(self.literals[0], at + 1, end)
        return at

    def end_of_key(self, text: str, at: int, end: int) -> int | None:
        """Return the end of the key at `at`, where the first literal is, or None if it is no key."""
        at += len(self.literals[0])
        for _, literal in self._numbers:
            number = _DIGITS.match(text, at, end)
            if number is None or not text.startswith(literal, number.end(), end):
                return None
            at = number.end() + len(literal)
        return at

    def read(self, text: str, at: int, end: int) -> tuple[int, list[_Span]] | None:
        """Return the end of the mark at `at` and its numbers' spans, or None if it is no mark."""
        if not text.startswith(self.literals[0], at, end):
            return None
        at += len(self.literals[0])
        numbers: list[_Span] = []
        for field, literal in zip(self.fields, self.literals[1:], strict=True):
            if field == "n":
                number = _DIGITS.match(text, at, end)
                if number is None or not text.startswith(literal, number.end(), end):
                    return None
                numbers.append(number.span())
                at = number.end() + len(literal)
                continue
            found = text.find(literal, at, end)
            # A title has no mark in it: it would reach into the next document.
            limits = _LINE_BREAKS if field == "*" else self.literals[:1]
            if found < 0 or any(each and text.find(each, at, found) >= 0 for each in limits):
                return None
            at = found + len(literal)
        return at, numbers

    def sample(self, number: int) -> str:
        filled = ("" if field == "*" else str(number) for field in self.fields)
        return self.literals[0] + "".join(
            value + literal for value, literal in zip(filled, self.literals[1:], strict=True)
        )


class DocumentTemplate:
    r"""`form` shows one document of a message, such as `<document id="{id}">\n{text}\n</document>`, with literal braces
    written twice:

    - {text}, and optionally {id} and {title}
    - {n}, once or more: the document's number in the list, from 0 or 1, which stays in place
    - {*}: anything or nothing within a line, such as attributes

    Documents are recognised by the texts before and after them, which must alternate; white space and `BOUNDARY` may
    separate them. With `between`, exactly this text separates them, and none is needed after each: the list begins
    after `head` and ends before `tail` (or one of several), which occur once; without a tail the last document stays in
    place. `{start}` and `{end}` are the message's.

    A form with {text} twice shows two documents, and so has head, `between` and tail. `name` is shown instead of the
    form. Raises TemplateError."""

    def __init__(
        self,
        form: str,
        *,
        head: str = "",
        between: str | None = None,
        tail: str | Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self.form = form.strip() if name is None else name
        literals, self._fields = _parse(form)
        if self._fields == ["text", "text"] and between is None:
            head, between, tail = literals
            literals, self._fields = ["", ""], ["text"]
        elif between is None:
            literals[0], literals[-1] = literals[0].lstrip(), literals[-1].rstrip()
        _check_fields(self._fields)
        at = self._fields.index("text")
        self._literals = literals
        self._opening = _Mark(literals[: at + 1], self._fields[:at])
        self._after = _Mark(literals[at + 1 :], self._fields[at + 1 :])
        # A text may contain what is before an id or title that follows it.
        self._is_late = bool({"id", "title"}.intersection(self._after.fields))
        self._closing = _Mark(self._after.literals[-1:], []) if self._is_late else self._after
        self._separator = self._closing.followed_by(between or "", self._opening)
        self._head, self._between = head, between
        self._tails = [tail] if isinstance(tail, str) else list(tail)
        self._check()

    @property
    def shows_id(self) -> bool:
        return "id" in self._fields

    @property
    def shows_number(self) -> bool:
        """Whether documents have numbers, which stay in place."""
        return "n" in self._fields

    def reads(self, role: str) -> bool:
        return role != "assistant"

    def find(self, text: str) -> DocumentRun | None:
        """Return the first longest run of two or more documents, or None, in linear time."""
        longest: list[_Span] = []
        run: list[_Span] = []
        for start, end in self.spans(text):
            if run and self._are_adjacent(text, run[-1][1], start):
                run.append((start, end))
            else:
                run = [(start, end)]
            if len(run) > len(longest):
                longest = run
        if len(longest) < 2 or (self.shows_number and not self._ends_with(text, *longest[-1])):
            return None
        edges = [0, *(edge for span in longest for edge in span), len(text)]
        return DocumentRun([text[start:end] for start, end in pairwise(edges)])

    def has_one(self, text: str) -> bool:
        return next(self.spans(text), None) is not None

    def is_one(self, text: str) -> bool:
        spans = list(islice(self.spans(text), 2))
        return len(spans) == 1 and _is_blank(text, 0, spans[0][0]) and _is_blank(text, spans[0][1], len(text))

    def spans(self, text: str) -> Iterator[_Span]:
        region = self._region(text)
        if region is None:
            return
        start, stop, ends = region
        if self._between is None:
            yield from self._marked(text, start, stop)
        else:
            yield from self._separated(text, start, stop, self._between, ends=ends)

    def split(self, document: str) -> DocumentParts:
        """Divide a document at its number or id; leave it whole without one, or if its numbers differ."""
        if self.shows_number:
            return self._at_numbers(document)
        if not self.shows_id:
            return DocumentParts((document, ""), "")
        place = self._id_in(document)
        start, end = place.start, place.stop
        closing = _CLOSING.get(document[start - 1])
        if closing is not None and (closed_at := document.find(closing, start, end)) >= 0:
            # The tag has more than the template shows: the template's next text comes later.
            end = closed_at
        return DocumentParts((document[:start], document[end:]), document[start:end])

    def _check(self) -> None:
        if self._between is None:
            for mark, side in ((self._opening, "before"), (self._closing, "after")):
                if not mark.literals[0].strip():
                    raise TemplateError(
                        f"a template needs visible text {side} its fields, to mark where a document begins and ends; "
                        "or show two documents in a row, with the text before, between and after them"
                    )
            opens, closes = self._opening.literals[0], self._closing.literals[0]
            if not (self._opening.fields[:1] == self._closing.fields[:1] == ["n"]) and (
                opens in closes or closes in opens
            ):
                raise TemplateError("the text before a document and the text after it must not contain each other")
        else:
            self._check_separator(self._between)
        literals = [*self._literals[1:-1], *([self._literals[-1]] if self._fields[-1] not in ("n", "text") else [])]
        if not all(literals):
            raise TemplateError("a template needs text between two fields, to mark where one ends")
        samples = [self._opening.sample(n) + "1" + self._after.sample(n) for n in (1, 2, 3)]
        listed = (self._between or "").join(samples)
        for tail in self._tails or [""]:
            run = self.find(self._head.replace(START, "") + listed + tail.replace(END, ""))
            if run is None or list(run.documents) != samples[: 3 if self._between is None or tail else 2]:
                raise TemplateError(
                    "three adjacent documents are not recognised: choose other text before and after the fields"
                )

    def _check_separator(self, between: str) -> None:
        if self._is_late:
            raise TemplateError("{id} and {title} must come before {text} in a template with text between documents")
        if not self._separator.literals[0]:
            raise TemplateError("nothing separates the documents: give the text between them")
        if not self._opening.literals[0] and not self._head:
            raise TemplateError("nothing marks the first document: give the text before it")
        # Documents have blank lines themselves.
        bounded = self._head.strip() and self._tails and all(map(str.strip, self._tails))
        if not self._separator.is_visible and not (bounded and "\n" in between):
            raise TemplateError(
                "documents separated by a line break need visible text before the first and after the last one"
            )

    def _region(self, text: str) -> tuple[int, int, bool] | None:
        """Return the list's bounds, and whether its end is known; None if unclear."""
        start, stop, ends = 0, len(text), END in self._tails
        if self._head and self._head != START:
            start = text.find(self._head)
            if start < 0 or text.find(self._head, start + 1) >= 0:
                return None
            start += len(self._head)
        tails = [(at, at + len(tail)) for tail in self._tails for at in _first_two(text, tail, start)]
        if tails:
            # One tail may be the end of another one; white space may be anywhere.
            visible = {end for at, end in tails if not text[at:end].isspace()}
            if len(visible) > 1:
                return None
            stop, ends = min(tails)[0], True
        return start, stop, ends

    def _marked(self, text: str, start: int, stop: int) -> Iterator[_Span]:
        opening, closing = self._opening, self._closing
        opened_at, ended_at = opening.find(text, start, stop), -1
        while opened_at >= 0:
            inside = opening.end_of_key(text, opened_at, stop) or opened_at + 1
            closed_at = closing.find(text, inside, stop)
            if closed_at < 0:
                return
            doubled_at = opening.find(text, inside, closed_at)
            if doubled_at >= 0 and self._is_example(text, opened_at, doubled_at, ended_at):
                opened_at = doubled_at
                continue
            closed = closing.read(text, closed_at, stop)
            end = closed_at + 1 if closed is None else closed[0]
            next_opened_at = opening.find(text, end, stop)
            until = stop if next_opened_at < 0 else next_opened_at
            is_clear = closed is not None and doubled_at < 0 and closing.find(text, end, until) < 0
            if is_clear and text.find(BOUNDARY, inside, closed_at) < 0 and self._has_fields(text, opened_at, closed_at):
                yield opened_at, end
            ended_at, opened_at = end, next_opened_at

    @staticmethod
    def _is_example(text: str, opened_at: int, doubled_at: int, ended_at: int) -> bool:
        """Return whether an opening mark is an example: within a line, while the next one begins a line."""
        if ended_at >= 0 and _is_blank(text, ended_at, opened_at):
            return False
        return not _begins_line(text, opened_at) and _begins_line(text, doubled_at)

    def _separated(self, text: str, start: int, stop: int, between: str, *, ends: bool) -> Iterator[_Span]:
        """Yield a list's documents, the last one only if the end is known."""
        opening, closing, separator = self._opening, self._closing, self._separator
        begun = start if self._head else opening.find(text, start, stop)
        first = None if begun < 0 else opening.read(text, begun, min(stop, begun + _LONGEST_MARK))
        if first is None or text.find(BOUNDARY, begun, stop) >= 0:
            return
        inside = first[0]
        at = separator.find(text, inside, stop)
        while at >= 0:
            limit = min(stop, at + _LONGEST_MARK)
            separated, closed = separator.read(text, at, limit), closing.read(text, at, limit)
            if separated is None or closed is None:
                at = separator.find(text, at + 1, stop)
                continue
            if 0 <= separator.find(text, at + 1, limit) < separated[0]:
                # The texts around it begin or end with a part of it: they may be divided at either place.
                return
            yield begun, closed[0]
            begun, inside = closed[0] + len(between), separated[0]
            at = separator.find(text, inside, stop)
        if ends and self._ends_closed(text, inside, stop):
            yield begun, stop

    def _ends_closed(self, text: str, inside: int, stop: int) -> bool:
        at = text.rfind(self._closing.literals[0], inside, stop)
        closed = self._closing.read(text, at, stop) if at >= 0 else None
        return closed is not None and closed[0] == stop

    def _ends_with(self, text: str, start: int, end: int) -> bool:
        """Return whether a numbered list ends with this document: no marks follow, or one document of unknown end with
        the next number. Otherwise its text may have marks."""
        if self._between is None:
            return all(mark.find(text, end, len(text)) < 0 for mark in (self._opening, self._closing))
        follows = end + len(self._between)
        if not text.startswith(self._between, end) or (opened := self._opening.read(text, follows, len(text))) is None:
            return True
        number, following = self._at_numbers(text[start:end]).id, {text[at:stop] for at, stop in opened[1]}
        return not number.isdigit() or following == {str(int(number) + 1)}

    def _are_adjacent(self, text: str, start: int, end: int) -> bool:
        return _is_blank(text, start, end) if self._between is None else text[start:end] == self._between

    def _has_fields(self, text: str, opened_at: int, closed_at: int) -> bool:
        opened = self._opening.read(text, opened_at, closed_at)
        if opened is None or not self._is_late:
            return opened is not None
        start = opened[0]
        for literal in self._after.literals[:-1]:
            start = text.find(literal, start, closed_at)
            if start < 0:
                return False
            start += len(literal)
        return True

    def _at_numbers(self, document: str) -> DocumentParts:
        places: list[_Span] = []
        if (opened := self._opening.read(document, 0, len(document))) is not None:
            places += opened[1]
        if "n" in self._closing.fields:
            closed_at = document.rfind(self._closing.literals[0])
            if (closed := self._closing.read(document, closed_at, len(document))) is not None:
                places += closed[1]
        numbers = {document[start:end] for start, end in places}
        if len(numbers) != 1:
            return DocumentParts((document, ""), "")
        edges = [0, *(edge for span in places for edge in span), len(document)]
        pieces = [document[start:end] for start, end in pairwise(edges)]
        return DocumentParts(tuple(pieces[::2]), numbers.pop())

    def _id_in(self, document: str) -> slice:
        # A document's text may contain the separator of fields: a field before the text is searched from the start, one
        # after it from the end, so that the text is never mistaken for the id.
        start, end = len(self._literals[0]), len(document) - len(self._literals[-1])
        between, place = self._literals[1:-1], self._fields.index("id")
        if place < self._fields.index("text"):
            for literal in between[:place]:
                start = document.find(literal, start, end) + len(literal)
            return slice(start, document.find(between[place], start, end))
        for literal in reversed(between[place:]):
            end = document.rfind(literal, start, end)
        literal = between[place - 1]
        return slice(document.rfind(literal, start, end) + len(literal), end)


def _is_blank(text: str, start: int, end: int) -> bool:
    between = text[start:end].replace(BOUNDARY, "")
    return not between or between.isspace()


def _first_two(text: str, mark: str, start: int) -> Iterator[int]:
    if mark == END:
        return
    at = text.find(mark, start)
    if at >= 0:
        yield at
        if (at := text.find(mark, at + 1)) >= 0:
            yield at


def _begins_line(text: str, at: int) -> bool:
    before = text[max(0, at - _LONGEST_MARK) : at].rstrip(" \t")
    return not before or before.endswith(_LINE_BREAKS)


def _parse(form: str) -> tuple[list[str], list[str]]:
    """Return literals, and the fields between them."""
    try:
        parts = list(Formatter().parse(form))
    except ValueError as error:
        raise TemplateError(f"{error}; a literal brace is written twice") from None
    literals, fields = [""], []
    for literal, field, kind, conversion in parts:
        literals[-1] += literal
        if field is None:
            continue
        if field not in _FIELDS or kind or conversion:
            raise TemplateError("a template has {text}, optionally {id}, {title}, {n} and {*}, and no other field")
        fields.append(field)
        literals.append("")
    return literals, fields


def _check_fields(fields: Sequence[str]) -> None:
    single = [field for field in fields if field in ("id", "text", "title")]
    if "text" not in fields or len(set(single)) < len(single):
        raise TemplateError("a template has {text} once (or alone, twice), and {id} and {title} at most once")
    if "n" in fields and "id" in fields:
        raise TemplateError("a template has {id} or {n}: an id moves with its document, a number stays at its place")
    after = fields[fields.index("text") + 1 :]
    if {"n", "*"}.intersection(after) and {"id", "title"}.intersection(after):
        raise TemplateError("after {text} a template has {n} and {*}, or {id} and {title}, but not both")
