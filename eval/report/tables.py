"""Tables, in no format yet: a page, Markdown and the console are made of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Entry", "Table"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a table: what it says, and below it in small letters what belongs to it."""

    text: str
    note: str = ""
    verdict: str = ""


@dataclass(slots=True)
class Table:
    """`labels` of the first columns are words and head their row."""

    title: str
    headings: Sequence[str]
    rows: list[list[Entry]] = field(default_factory=list)
    labels: int = 1
    note: str = ""
