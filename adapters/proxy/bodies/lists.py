"""Recognition of lists whose order means nothing: memories, skills, preferences."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragorder.adapters.proxy.bodies.body import BOUNDARY
from ragorder.adapters.proxy.bodies.template import DocumentTemplate

_LONGEST = 1 << 20
_LONGEST_HEADING = 120
# "[User Memory]", "User Memories:", "## Available skills", "<memory_context>", "**Preferences:**".
_NAMES = re.compile(r"(?<![a-z])(?:memor(?:y|ies)|skills|preferences)(?![a-z])|记忆|技能|偏好", re.IGNORECASE)
_ORDER = re.compile(
    r"\b(?:rank|order|priorit|sort|top\b|best|most|first|last|latest|recent|newest|oldest|chronolog|histor|timeline|step"
    r"|sequence)|按|排序|最近|最新|步骤",
    re.IGNORECASE,
)
_ITEM = re.compile(r"([-*•]) +(?=\S)")
_CONTINUED = re.compile(r"[ \t]+\S")
_NUMBER = re.compile(r"[^\w\n]*([0-9][0-9:./T -]*)")
# What may begin the line right after a list: before any other line its end is unclear.
_AFTER = re.compile(r"[<#\[]|\*\*|---")
_INSTRUCTIONS = ("system", "developer")
_Span = tuple[int, int]


class ElementTemplate(DocumentTemplate):
    """Form of lists of elements (<skill>); read in instructions only."""

    def reads(self, role: str) -> bool:
        return role in _INSTRUCTIONS


class ListTemplate(DocumentTemplate):
    """Form of bulleted lists whose headings name memories, skills or preferences.

    A list keeps its order if that may mean something (numbers, a heading with "recent", dates that rise or fall), or if
    its end is unclear. Only instructions are read: a list elsewhere may belong to the question.
    """

    def __init__(self) -> None:
        super().__init__("- {text}\n- {text}\n", name="memories")

    def reads(self, role: str) -> bool:
        return role in _INSTRUCTIONS

    def _check(self) -> None:
        """Refuse nothing: a heading marks the list, not the template."""

    def spans(self, text: str) -> Iterator[_Span]:
        if len(text) > _LONGEST or _NAMES.search(text) is None:
            return
        start = 0
        for part in text.split(BOUNDARY):
            for list_ in _lists(part):
                yield from ((start + begin, start + end) for begin, end in list_)
            start += len(part) + len(BOUNDARY)

    def _are_adjacent(self, text: str, start: int, end: int) -> bool:
        # Other text is the heading of another list.
        return text[start:end].isspace()


def list_templates() -> list[DocumentTemplate]:
    elements = ("<skill>{text}</skill>", "<memory{*}>{text}</memory>")
    return [ListTemplate(), *map(ElementTemplate, elements)]


def _lists(text: str) -> Iterator[list[_Span]]:
    lines = _lines(text)
    place = 0
    while place < len(lines):
        start, end = lines[place]
        place += 1
        if not _is_heading(text[start:end]):
            continue
        if place < len(lines) and lines[place][0] == lines[place][1]:
            place += 1
        items, place = _items(text, lines, place)
        if not _is_sorted([text[start + 2 : end] for start, end in items]):
            yield items


def _lines(text: str) -> list[_Span]:
    lines, start = [], 0
    for line in text.split("\n"):
        lines.append((start, start + len(line.rstrip())))
        start += len(line) + 1
    return lines


def _is_heading(line: str) -> bool:
    line = line.strip()
    if not line or len(line) > _LONGEST_HEADING or _NAMES.search(line) is None or _ORDER.search(line) is not None:
        return False
    if line[0] == "<":
        return line[-1] == ">" and line[1:2] != "/"
    return line[0] == "#" or line.rstrip("*")[-1:] in (":", "：") or (line[0], line[-1]) in (("[", "]"), ("*", "*"))


def _items(text: str, lines: list[_Span], place: int) -> tuple[list[_Span], int]:
    """Return the list's entries from a line on (none for a single one or an unclear end), and the line after it."""
    items: list[_Span] = []
    bullet, gaps, empty = None, set(), 0
    while place < len(lines):
        start, end = lines[place]
        found = _ITEM.match(text, start, end)
        if start == end:
            empty += 1
        elif found is not None and bullet in (None, found[1]):
            if items:
                gaps.add(empty)
            bullet, empty = found[1], 0
            items.append((start, end))
        elif items and not empty and _CONTINUED.match(text, start, end):
            items[-1] = items[-1][0], end
        else:
            break
        place += 1
    is_clear = place == len(lines) or empty > 0 or _AFTER.match(text, lines[place][0]) is not None
    return (items if is_clear and len(gaps) == 1 else []), place


def _is_sorted(entries: list[str]) -> bool:
    found = [_NUMBER.match(entry) for entry in entries]
    keys = [[int(number) for number in re.findall("[0-9]{1,9}", each[1])] for each in found if each is not None]
    return len(keys) == len(entries) and keys in (sorted(keys), sorted(keys, reverse=True))
