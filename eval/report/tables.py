"""Tables for the console (rich), Markdown and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

Tone = Literal["", "good", "bad", "doubtful"]

_STYLES = {"": "", "good": "green", "bad": "bold red", "doubtful": "yellow"}
_VERDICTS = {"better": ("▲ ", "green"), "worse": ("▼ ", "bold red"), "no difference": ("= ", "dim")}
_UNBROKEN = 16
"""Characters of the longest field that is never wrapped on the console."""
_HEADING = 16
"""Characters of a line of a heading there."""
_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A field, with a note and a verdict below it in small letters."""

    text: str
    note: str = ""
    verdict: str = ""
    tone: Tone = ""

    def __rich__(self) -> Text:
        from rich.text import Text

        text = Text().append(self.text, _STYLES[self.tone])
        if self.note:
            text.append(f"\n{self.note}", "dim")
        if self.verdict:
            mark, style = _VERDICTS.get(self.verdict, ("", "dim"))
            text.append(f"\n{mark}{self.verdict}", style)
        return text


@dataclass(slots=True)
class Table:
    """Rows of entries under headings; the first `labels` columns hold words, the others numbers.

    rich prints it as it is; `markdown` yields its lines; the page's template reads its fields.

    >>> table = Table("Cached tokens", ["policy", "%"])
    >>> table.add("retrieval", "31.0")
    >>> table.add("free", Entry("48.2", verdict="better"), tone="good")
    >>> Console().print(table)
    """

    title: str = ""
    headings: Sequence[str] = ()
    rows: list[list[Entry]] = field(default_factory=list)
    labels: int = 1
    note: str = ""
    dividers: list[int] = field(default_factory=list)

    def add(self, *fields: str | Entry, tone: Tone = "") -> None:
        """Append a row; `tone` is for entries without their own."""
        entries = [each if isinstance(each, Entry) else Entry(each) for each in fields]
        self.rows.append([replace(each, tone=each.tone or tone) for each in entries])

    def divide(self) -> None:
        """Rule a line below the rows so far, on the console."""
        self.dividers.append(len(self.rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, in parts with the same labels if it is wider than the console."""
        from rich.measure import Measurement
        from rich.text import Text

        unbounded = options.update(width=_ANY_WIDTH)
        # With one cell its label is empty.
        labels = [
            place
            for place, heading in enumerate(self.headings[: self.labels])
            if heading or any(row[place].text for row in self.rows)
        ]
        parts: list[list[int]] = [[]]
        for place in range(self.labels, len(self.headings)):
            if parts[-1]:
                wider = self._columns([*labels, *parts[-1], place])
                if Measurement.get(console, unbounded, wider).minimum > options.max_width:
                    parts.append([])
            parts[-1].append(place)
        for number, part in enumerate(parts, 1):
            table = self._columns([*labels, *part])
            table.title = Text(self.title) if self.title and number == 1 else None
            table.caption = Text(self.note) if self.note and number == len(parts) else None
            yield table

    def _columns(self, places: Sequence[int]) -> RichTable:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable()
        for place in places:
            heading, fields = self.headings[place], [row[place] for row in self.rows]
            whole = all((len(each.text) <= _UNBROKEN or " " not in each.text) and not each.note for each in fields)
            words = place < self.labels
            lines = heading if "\n" in heading else fill(heading, _HEADING, break_long_words=False)
            # No figure is broken and no word of a label, except very long ones.
            texts = [lines, *(each.text for each in fields)]
            kept = [part for text in texts for part in (text.splitlines() if whole else text.split())]
            width = max(map(len, kept), default=0)
            table.add_column(
                Text(lines),
                justify="left" if words else "right",
                no_wrap=whole,
                overflow="fold",
                style="bold" if place == places[0] else "",
                min_width=width if whole else min(width, _UNBROKEN),
            )
        for number, row in enumerate(self.rows, 1):
            table.add_row(*(row[place] for place in places), end_section=number in self.dividers)
        return table

    def markdown(self, level: str = "##") -> Iterator[str]:
        """Lines of GitHub's Markdown, under a heading of this level unless it is empty."""
        if self.title and level:
            yield f"{level} {markdown_text(self.title)}\n"
        if self.rows:
            yield f"| {' | '.join(map(markdown_text, self.headings))} |"
            rule = ("---" if place < self.labels else "---:" for place in range(len(self.headings)))
            yield f"|{'|'.join(rule)}|"
            yield from (f"| {' | '.join(map(_markdown_entry, row))} |" for row in self.rows)
            yield ""
        if self.note:
            yield f"{markdown_text(self.note)}\n"


def _markdown_entry(entry: Entry) -> str:
    inside = ", ".join(filter(None, (entry.note, entry.verdict)))
    return markdown_text(f"{entry.text} ({inside})" if inside else entry.text)


def markdown_text(text: str) -> str:
    """On one line, with characters escaped that would end a field or begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
