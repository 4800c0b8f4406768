"""Evidence that a separator in prompts separates documents."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

from ragorder.adapters.learning.texts import distinct_marks, places

T = TypeVar("T")
S = TypeVar("S", str, int)

MARKED = 5
"""Distinct marks of a separator that hardly occurs inside a document."""

CONTEXT = 90

ANCHOR = re.compile(r"[^\W\d_]{6,}")
KEY = 20


class Boundary(NamedTuple):
    """Position of a separator, and digests of the texts before and after it."""

    at: int
    before: int
    after: int


class Evidence:
    """Neighbours of a separator in texts.

    A boundary is proven if the text before it had two different successors, and the text after it two different
    predecessors: a running header or a licence has many neighbours on one side only. Texts are identified by their next
    90 characters, which may reach into the neighbour; neighbours are compared up to the next separator.
    """

    def __init__(self, separator: str, texts: Iterable[str]) -> None:
        self.separator = separator
        self.is_weak = distinct_marks(separator) < MARKED
        self.seen: Counter[int] = Counter()
        # The one neighbour that a text had, or True for several.
        self._successor: dict[int, str | Literal[True]] = {}
        self._predecessor: dict[int, str | Literal[True]] = {}
        # Short pieces and the texts that have them: a line of several documents proves nothing.
        self._piece: dict[int, tuple[int, str]] = {}
        self._owner: dict[tuple[int, str], int | Literal[True]] = {}
        self._around: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self._befores: defaultdict[int, set[int]] = defaultdict(set)
        self._afters: defaultdict[int, set[int]] = defaultdict(set)
        self.anchors: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        """Offset and digest of the texts that begin shortly before a word."""
        for text in texts:
            self.observe(text)

    def boundaries(self, text: str, start: int = 0, end: int | None = None) -> list[Boundary]:
        length = len(self.separator)
        return [
            Boundary(at, hash(text[max(start, at - CONTEXT) : at]), hash(text[at + length : at + length + CONTEXT]))
            for at in places(text, self.separator, start, end)
        ]

    def observe(self, text: str) -> None:
        found = self.boundaries(text)
        length = len(self.separator)
        for place, (at, before, after) in enumerate(found):
            is_last = place + 1 == len(found)
            stop = len(text) if is_last else found[place + 1].at
            begin = found[place - 1].at + length if place else 0
            front = text[max(begin, at - CONTEXT) : at]
            back = text[at + length : min(stop, at + length + CONTEXT)]
            _vary(self._successor, before, back, str.startswith)
            _vary(self._predecessor, after, front, str.endswith)
            if self.is_weak:
                for key, side, piece in ((before, 0, front), (after, 1, back)):
                    if len(piece) < CONTEXT:
                        self._piece[key] = side, piece
                        _vary(self._owner, (side, piece), key, int.__eq__)
            around = (found[place - 1].before if place else 0, 0 if is_last else found[place + 1].after)
            if around not in self._around[before, after]:
                self._around[before, after].add(around)
                self.seen[before] += 1
                self.seen[after] += 1
            self._befores[after].add(before)
            self._afters[before].add(after)
            if word := ANCHOR.search(text, at + length, at + length + CONTEXT):
                self.anchors[text[word.start() : word.start() + KEY]].add((word.start() - at - length, after))

    def proves(self, boundary: Boundary) -> bool:
        return self._proves(boundary.before, boundary.after)

    def is_inner(self, boundary: Boundary) -> bool:
        """Return whether both sides were always together while their neighbours varied."""
        before, after = boundary.before, boundary.after
        if self._is_varied(before) or self._predecessor.get(after) is True:
            return False
        return self._together(before, after)

    def begins(self, after: int) -> bool:
        befores = self._befores.get(after, ())
        if any(self._together(before, after) and not self._is_varied(before) for before in befores):
            return False
        return any(self._proves(before, after) for before in befores)

    def ends(self, before: int) -> bool:
        afters = self._afters.get(before, ())
        if any(self._together(before, after) and self._predecessor.get(after) is not True for after in afters):
            return False
        return any(self._proves(before, after) for after in afters)

    def accepts(self, boundary: Boundary) -> bool:
        """Return whether both sides are known, or one is known and the other new; at a weak separator, where a chunk
        may begin inside another one, both must be known."""
        ends, begins = self.ends(boundary.before), self.begins(boundary.after)
        if (ends and begins) or self.is_weak:
            return ends and begins
        return (ends and self.seen[boundary.after] < 2) or (begins and self.seen[boundary.before] < 2)

    def _is_varied(self, before: int) -> bool:
        return self._successor.get(before) is True

    def _proves(self, before: int, after: int) -> bool:
        if any(self._owner.get(self._piece[key]) is True for key in (before, after) if key in self._piece):
            return False
        return self._is_varied(before) and self._predecessor.get(after) is True

    def _together(self, before: int, after: int) -> bool:
        return len(self._around.get((before, after), ())) > 1


def _vary(known: dict[T, S | Literal[True]], key: T, new: S, agrees: Callable[[S, S], bool]) -> None:
    old = known.setdefault(key, new)
    if old is True or agrees(new, old):
        return
    known[key] = new if agrees(old, new) else True
