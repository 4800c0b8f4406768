"""Changes before the conversation: fields, tools and lists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import add
from typing import Literal, NamedTuple

from ragorder.adapters.doctor.beginnings import shared_beginnings
from ragorder.adapters.doctor.request_log import LoggedRequest

ToolsChange = Literal["order", "names", "texts"]
ListChange = Literal["order", "items"]
Scope = tuple[str, str]

CERTAIN_FIELDS = frozenset({"model", "cache_salt"})
"""Fields that separate caches; others may."""

_ITEM = re.compile(r"[ \t]*(?:[-*•+–·]|\d{1,3}[.):])[ \t]+(?=\S)")
_PARAGRAPH = re.compile(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_FEWEST = 3


def without_fields(requests: Iterable[LoggedRequest]) -> list[LoggedRequest]:
    """Return the requests as if all had the same fields."""
    return [replace(each, scope=("", "")) for each in requests]


def separations(requests: Sequence[LoggedRequest]) -> Iterator[tuple[LoggedRequest, int, Sequence[str]]]:
    """Yield each request, the characters that begin an earlier one too, and the fields that differ; none if a request
    with the same fields shares half as much."""
    by_fields = [replace(each, scope=("\n".join(map(str, sorted(each.fields.items()))), "")) for each in requests]
    shared, own = shared_beginnings(without_fields(requests)), shared_beginnings(by_fields)
    for request, most, same in zip(requests, shared, own, strict=True):
        if most.earlier is not None:
            fields, theirs = request.fields, most.earlier.fields
            differ = [name for name in sorted(fields.keys() | theirs.keys()) if fields.get(name) != theirs.get(name)]
            yield request, most.characters, [] if 2 * same.characters >= most.characters else differ


def tool_changes(requests: Iterable[LoggedRequest]) -> dict[int, ToolsChange]:
    """Return, by line, how requests' tools differ from all earlier ones of their scope."""
    orders: defaultdict[Scope, set[tuple[str, ...]]] = defaultdict(set)
    sets: defaultdict[Scope, set[frozenset[str]]] = defaultdict(set)
    found: dict[int, ToolsChange] = {}
    for request in requests:
        scope, names, texts = request.scope, tuple(request.tools), tuple(request.tools.values())
        if not names:
            continue
        if orders[scope] and texts not in orders[scope]:
            is_known = frozenset(texts) in sets[scope]
            found[request.line] = "order" if is_known else "texts" if frozenset(names) in sets[scope] else "names"
        orders[scope].add(texts)
        sets[scope] |= {frozenset(texts), frozenset(names)}
    return found


def with_one_tools_order(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Give requests with tools all tools of their scope, with their first texts, sorted by name."""
    tools: defaultdict[Scope, dict[str, str]] = defaultdict(dict)
    for request in requests:
        tools[request.scope] = {**request.tools, **tools[request.scope]}
    ordered = {scope: dict(sorted(each.items())) for scope, each in tools.items()}
    return [each.with_tools(ordered[each.scope]) if each.tools else each for each in requests]


class _List(NamedTuple):
    """Items of a text; the marks ("- ") may be empty."""

    start: int
    end: int
    marks: tuple[str, ...]
    items: tuple[str, ...]


def list_changes(requests: Sequence[LoggedRequest]) -> dict[int, ListChange]:
    """Return, by line, how requests differ from all earlier ones of their scope first in a list of the system message:
    by the order of its items, or by known items."""
    orders: defaultdict[Scope, set[tuple[str, ...]]] = defaultdict(set)
    known: defaultdict[Scope, set[str]] = defaultdict(set)
    found: dict[int, ListChange] = {}
    for request, shared in zip(requests, shared_beginnings(requests), strict=True):
        lists, scope = list(_lists(request)), request.scope
        for each in lists:
            if shared.earlier is None or not each.start <= shared.characters < each.end or each.items in orders[scope]:
                continue
            if tuple(sorted(each.items)) in orders[scope]:
                found[request.line] = "order"
            elif all(each.marks) and _item_at(each, shared.characters) in known[scope]:
                found[request.line] = "items"
        orders[scope] |= {order for each in lists for order in (each.items, tuple(sorted(each.items)))}
        known[scope].update(item for each in lists for item in each.items)
    return found


def with_one_list_order(requests: Iterable[LoggedRequest]) -> list[LoggedRequest]:
    """Sort the items of each list in the system messages."""
    return [replace(request, text=_sorted(request)) for request in requests]


def _sorted(request: LoggedRequest) -> str:
    pieces, done = [], 0
    for each in _lists(request):
        items = map(add, each.marks, sorted(each.items))
        pieces += [request.text[done : each.start], "\n".join(items)]
        done = each.end
    return "".join(pieces) + request.text[done:]


def _lists(request: LoggedRequest) -> Iterator[_List]:
    """Yield runs of three or more marked items, or else paragraphs of three or more lines."""
    for paragraph in _PARAGRAPH.finditer(request.text, request.tools_end, request.system_end):
        start, runs = paragraph.start(), []
        for _, group in groupby(_items(paragraph.group()), key=lambda item: bool(_ITEM.match(item))):
            items = list(group)
            end = start + sum(map(len, items)) + len(items) - 1
            marks = tuple(match.group() if (match := _ITEM.match(item)) else "" for item in items)
            runs.append(_List(start, end, marks, tuple(map(str.removeprefix, items, marks))))
            start = end + 1
        lists = [each for each in runs if all(each.marks) and len(each.items) >= _FEWEST]
        yield from lists or (each for each in runs if len(each.items) >= _FEWEST)


def _items(paragraph: str) -> list[str]:
    """Lines indented below an item stay with it."""
    items: list[str] = []
    for line in paragraph.split("\n"):
        mark = _ITEM.match(items[-1]) if items else None
        if mark is not None and _indent(line) > _indent(items[-1]):
            items[-1] += f"\n{line}"
        else:
            items.append(line)
    return items


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _item_at(found: _List, at: int) -> str:
    ends = accumulate(len(mark) + len(item) + 1 for mark, item in zip(found.marks, found.items, strict=True))
    return next(item for item, end in zip(found.items, ends, strict=True) if at < found.start + end)
