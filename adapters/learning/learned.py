"""The learned form of documents in prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ragorder.adapters.learning.evidence import ANCHOR, CONTEXT, KEY, MARKED, Boundary, Evidence
from ragorder.adapters.learning.texts import (
    CONTROL,
    NUMBER,
    DigitText,
    distinct_marks,
    places,
    shared_beginning,
)
from ragorder.adapters.proxy.bodies.template import DocumentRun

BY_PLACE, WITH_DOCUMENT = "n", "id"
"""A separator's number is the document's place or moves with the document; other kinds are a constant's digits."""

CROSSED = "documents contain another separator"
_NEAR = 150


@dataclass(frozen=True, slots=True)
class Found:
    """Documents in a text, as (start, end) pairs."""

    text: str
    spans: Sequence[tuple[int, int]]

    @property
    def documents(self) -> list[str]:
        return [self.text[start:end] for start, end in self.spans]

    def run(self) -> DocumentRun:
        edges = [0, *(edge for span in self.spans for edge in span), len(self.text)]
        return DocumentRun([self.text[start:end] for start, end in pairwise(edges)])


class LearnedTemplate:
    """Documents after `head`, separated by `separator`, before `tail`, in which `NUMBER` stands for digits.

    The separator's first `footer` characters, with which the tail begins too, belong to the document before; those from
    `header` on, with which the head ends, belong to the next.
    """

    def __init__(self, head: str, separator: str, tail: str, evidence: Evidence) -> None:
        self.head, self.separator, self.tail = head, separator, tail
        self.evidence = evidence
        self.is_marked = distinct_marks(separator) >= MARKED
        self.numbers = [at for at, character in enumerate(separator) if character == NUMBER]
        self.kinds = [BY_PLACE for _ in self.numbers]
        self.first = 1
        self.is_counted = False
        """Whether each text's numbers were in sequence: then they prove even a weak separator."""
        self.footer = len(shared_beginning(separator, tail))
        self.header = len(separator) - len(shared_beginning(separator[::-1], head[::-1]))
        self.cut = (len(separator), 0)
        """Positions in the separator where a document begins and where one ends."""
        self.has_marked_head = distinct_marks(separator[self.header :]) >= MARKED
        self.has_marked_tail = distinct_marks(separator[: self.footer]) >= MARKED

    @property
    def proves_by_number(self) -> bool:
        """Whether numbers prove boundaries between unknown documents."""
        return BY_PLACE in self.kinds and (self.is_marked or self.is_counted)

    def region(self, text: str) -> tuple[int, int] | str:
        """Return where the documents begin and end, or why it is unclear."""
        if (count := text.count(self.head)) != 1:
            return f"the text before the documents {'is missing' if not count else 'occurs twice'}"
        start = text.index(self.head) + len(self.head)
        ends = places(text, self.tail, start)
        if len(ends) != 1:
            return f"the text after the documents {'occurs twice' if ends else 'is missing'}"
        return start, ends[0]

    def find(self, raw: str) -> Found | str:
        """Return a prompt's documents, or why it must stay unchanged."""
        digits = DigitText(raw)
        text = digits.text
        region = "a control character" if CONTROL.search(raw) else self.region(text)
        if isinstance(region, str):
            return region
        start, end = region
        boundaries = self._proven(digits, self.evidence.boundaries(text, start, end), start)
        if isinstance(boundaries, str):
            return boundaries
        ats = [each.at for each in boundaries]
        begins = [at + self.cut[0] for at in (start - len(self.separator), *ats)]
        spans = list(zip(begins, [at + self.cut[1] for at in (*ats, end)], strict=True))
        # What stands at the first or the last place may be a note, if nothing marks it.
        begun = self.has_marked_head or self.evidence.begins(hash(text[start : start + CONTEXT]))
        ended = self.has_marked_tail or self.evidence.ends(hash(text[max(start, end - CONTEXT) : end]))
        spans = spans[not begun : len(spans) - (not ended)]
        if len(spans) < 2:
            return "fewer than two documents"
        if any(s >= e or text[s:e].isspace() for s, e in spans):
            return "an empty document"
        if self.is_marked and any(self._is_crossed(text, s, e) for s, e in spans):
            return CROSSED
        return Found(raw, [(digits.to_raw(s), digits.to_raw(e)) for s, e in spans])

    def is_numbered(self, digits: DigitText, ats: Iterable[int], start: int) -> bool:
        slots = [
            (kind, at, at >= self.header)
            for kind, at in zip(self.kinds, self.numbers, strict=True)
            if kind != WITH_DOCUMENT
        ]
        expected = [
            (at + slot, str(self.first + place + is_next) if kind == BY_PLACE else kind)
            for place, at in enumerate(ats)
            for kind, slot, is_next in slots
        ]
        before = start - len(self.separator)
        expected += [
            (before + at, str(self.first) if kind == BY_PLACE else kind) for kind, at, is_next in slots if is_next
        ]
        return all(digits.number(at) == number for at, number in expected)

    def _proven(self, digits: DigitText, boundaries: list[Boundary], start: int) -> list[Boundary] | str:
        if not boundaries:
            return "one document"
        if not self.is_numbered(digits, [each.at for each in boundaries], start):
            # A known document may contain the separator.
            boundaries = [each for each in boundaries if not self.evidence.is_inner(each)]
            if not self.is_numbered(digits, [each.at for each in boundaries], start):
                return "numbers that are not by place"
        if not self.proves_by_number:
            good = [each for each in boundaries if self.evidence.accepts(each)]
            if BY_PLACE in self.kinds and len(good) < len(boundaries):
                return "a boundary that is not proven, between numbers"
            boundaries = good
        return boundaries or "no proven boundary"

    def _is_crossed(self, text: str, start: int, end: int) -> bool:
        """Return whether known documents end and begin inside this one."""
        evidence = self.evidence
        for word in ANCHOR.finditer(text, start + CONTEXT, end):
            for offset, key in evidence.anchors.get(text[word.start() : word.start() + KEY], ()):
                at = word.start() - offset
                if hash(text[at : at + CONTEXT]) != key or not evidence.begins(key):
                    continue
                near = range(max(start + CONTEXT, at - _NEAR), at + 1)
                if any(evidence.ends(hash(text[place - CONTEXT : place])) for place in near):
                    return True
        return False


def increments(numbers: Sequence[str]) -> bool:
    return all(int(after) == int(before) + 1 for before, after in pairwise(numbers))
