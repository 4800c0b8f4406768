"""Texts in which each run of digits is one mark."""

from __future__ import annotations

import re
from bisect import bisect_left

START, END, NUMBER = "\x02", "\x03", "\x01"
CONTROL = re.compile("[\x01-\x03]")
"""Our marks, which a text must not have."""

_DIGITS = re.compile(r"[0-9]+")


class DigitText:
    """`text` is `raw` between START and END, with NUMBER for each run of digits, so that changing scores and dates do
    not end a repeat."""

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.text = START + _DIGITS.sub(NUMBER, raw) + END
        self._at: list[int] = []
        self._shift = [-1]
        shift = -1
        for run in _DIGITS.finditer(raw):
            self._at.append(run.start() - shift)
            shift += run.end() - run.start() - 1
            self._shift.append(shift)

    def to_raw(self, position: int) -> int:
        """Return the position in `raw` of one in `text`."""
        return min(max(position + self._shift[bisect_left(self._at, position)], 0), len(self.raw))

    def number(self, position: int) -> str:
        return self.raw[self.to_raw(position) : self.to_raw(position + 1)]


def agreement(text: str, at: int, other: str, other_at: int, *, backwards: bool = False) -> int:
    """Return how many characters agree from two positions on, or back from them."""
    limit = min(at, other_at) if backwards else min(len(text) - at, len(other) - other_at)
    agreed, step, grows = 0, 64, True
    while step:
        end = agreed + step
        if end > limit:
            fits = False
        elif backwards:
            fits = text[at - end : at - agreed] == other[other_at - end : other_at - agreed]
        else:
            fits = text[at + agreed : at + end] == other[other_at + agreed : other_at + end]
        agreed, grows = (end, grows) if fits else (agreed, False)
        step = step * 2 if grows else step // 2
    return agreed


def shared_beginning(one: str, other: str) -> str:
    return one[: agreement(one, 0, other, 0)]


def places(text: str, mark: str, start: int = 0, end: int | None = None) -> list[int]:
    """Return the positions of a mark, without overlaps."""
    end = len(text) if end is None else end
    found = []
    at = text.find(mark, start, end)
    while at >= 0:
        found.append(at)
        at = text.find(mark, at + len(mark), end)
    return found


def distinct_marks(text: str) -> int:
    """Return the number of different characters besides white space and digits."""
    return len({character for character in text if not character.isspace() and character != NUMBER})


def is_visible(text: str) -> bool:
    """Return whether a text may separate documents."""
    return "\n" in text or sum(not each.isalnum() and not each.isspace() and each != NUMBER for each in text) > 2
