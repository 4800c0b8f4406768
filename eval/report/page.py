"""Renderings of a report: one HTML file, which needs no network, Markdown, and the console."""

from __future__ import annotations

import csv
import io
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from ragorder.common.extras import needs
from ragorder.eval.report.canvas import COLOURS, need_matplotlib
from ragorder.eval.report.sections import Report, Section
from ragorder.eval.report.tables import Table, markdown_text
from ragorder.eval.running.load import Progress, silent

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


def csv_text(table: Table) -> str:
    """With columns of their own for notes and verdicts, where there are any."""
    file = io.StringIO()
    columns, rows = _cells(table)
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()


def json_text(table: Table) -> str:
    """A list of objects, their members named as the columns of the CSV."""
    columns, rows = _cells(table)
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], ensure_ascii=False)


def csv_url(table: Table) -> str:
    return f"data:text/csv;charset=utf-8,{quote(csv_text(table))}"


def json_url(table: Table) -> str:
    return f"data:application/json;charset=utf-8,{quote(json_text(table))}"


def file_name(table: Table) -> str:
    return re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")[:60] or "figures"


def _cells(table: Table) -> tuple[list[str], list[list[str | float | int]]]:
    columns: list[str] = []
    parts: list[tuple[int, str]] = []
    for place, heading in enumerate(table.headings):
        used = [
            name
            for name in ("text", "note", "verdict")
            if name == "text" or any(getattr(r[place], name) for r in table.rows)
        ]
        for name in used:
            column = " ".join(heading.split()) + ("" if name == "text" else f" ({name})")
            taken = columns.count(column) + 1
            columns.append(column if taken == 1 else f"{column} {taken}")
            parts.append((place, name))
    return columns, [[_plain(getattr(row[place], name)) for place, name in parts] for row in table.rows]


def _plain(text: str) -> str | float | int:
    """A number without what only the eye needs; anything else as it stands."""
    shown = " ".join(text.replace("−", "-").split())
    if not _NUMBER.fullmatch(shown):
        return "" if shown == "–" else shown
    digits = shown.replace(",", "")
    return float(digits) if "." in digits else int(digits)


def render_html(report: Report, progress: Progress = silent) -> str:
    """Raises ImportError naming the extra."""
    need_matplotlib()
    with needs("eval", "the report"):
        import jinja2
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"csv_url": csv_url, "json_url": json_url, "file_name": file_name}
    template = environment.from_string(_own("page.html"))
    advance, pictures = progress("drawing", len(report.sections)), {}
    for section in report.sections:
        pictures[section.suite.name] = list(section.pictures)
        advance()
    charts, script = [chart.picture() for chart in report.headline.charts], _own("page.js")
    opening = None if charts else next((each for each in report.sections if pictures[each.suite.name]), None)
    if opening is not None:
        # A report without a headline begins with its first picture.
        charts = [pictures[opening.suite.name].pop(0)]
    page: str = template.render(
        report=report,
        charts=charts,
        opening=opening.suite if opening is not None else None,
        pictures=pictures,
        colours=COLOURS,
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )
    return page


def _own(name: str) -> str:
    return files("ragorder.eval.report").joinpath(name).read_text("utf-8")


_FEW_WORDS = 3


def render_markdown(report: Report) -> str:
    return "\n".join(_lines(report)).strip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {report.title}\n"
    yield from (f"**{markdown_text(words)}**\n" for words in report.headline.words)
    if report.measured:
        yield f"{report.measured}.\n"
    if report.overview:
        yield from report.overview.markdown("##")
    if report.finding:
        yield "## The paper's trace, and the same with its ranks shuffled\n"
    yield from (f"{markdown_text(words)}\n" for words in report.finding)
    if report.side_by_side is not None:
        yield from report.side_by_side.markdown("")
    if report.not_measured:
        yield "## What was not measured\n"
    yield from (f"- {markdown_text(words)}" for words in report.not_measured)
    yield ""
    for section in report.sections:
        yield from _section(section)
    if report.checks is not None:
        yield from report.checks.markdown("##")
    if report.commands:
        yield "## To repeat it\n\n```"
        yield from report.commands
        yield "```\n"
    if report.statistics:
        yield f"## How to read the figures\n\n{report.statistics}\n"
    yield from (f"Measured on: {markdown_text(words)}.\n" for words in report.machines)
    if report.notes:
        yield "Notes on reading the results:\n"
        yield from (f"- {markdown_text(note)}" for note in report.notes)


def _section(section: Section) -> Iterator[str]:
    suite = section.suite
    yield f"## {markdown_text(suite.title)}\n"
    said = ". ".join(filter(None, (suite.says.rstrip("."), suite.source, section.engine, section.setting)))
    if said:
        yield f"{markdown_text(said)}.\n"
    yield from (f"{markdown_text(words)}\n" for words in section.words)
    for table in section.tables:
        yield from table.markdown("###")
    for policy, reason in section.unavailable:
        yield f"- {policy} not available: {markdown_text(reason)}"
    if section.unavailable:
        yield ""


def print_report(report: Report, console: Console) -> None:
    console.print(Text(f"{report.title}\n", "bold"))
    for words in report.headline.words:
        console.print(Text(words, "bold green"))
    for chart in report.headline.charts:
        console.print("", chart)
    if report.measured:
        console.print(Text(f"\n{report.measured}.\n", "dim"))
    if report.overview is not None:
        console.print(report.overview)
    for words in report.finding:
        console.print(Text(words))
    if report.side_by_side is not None:
        console.print(report.side_by_side)
    for section in report.sections:
        suite = section.suite
        console.print(Text(f"\n{suite.title}", "bold underline"))
        said = "; ".join(filter(None, (suite.says.rstrip("."), suite.source, section.engine, section.setting)))
        console.print(Text(said, "dim"))
        for words in section.words:
            console.print(Text(words, "yellow"))
        for table in section.tables:
            console.print(table)
        for policy, reason in section.unavailable:
            console.print(Text(f"{policy} not available: {reason}", "dim"))
    if report.checks is not None:
        console.print(report.checks)
    if report.not_measured:
        console.print(Text("\nWhat was not measured", "bold underline"))
    for words in (*report.not_measured, *report.notes):
        console.print(Text(f"- {words}"))
    if report.statistics:
        console.print(Text(f"\n{report.statistics}", "dim"))
    for words in report.machines:
        console.print(Text(f"Measured on: {words}.", "dim"))


def print_summary(report: Report, console: Console) -> None:
    """Print what a command has just measured: the headline and, of one suite, its tables."""
    for words in report.headline.words[:_FEW_WORDS]:
        console.print(Text(words, "bold green"))
    cells = [len(each.cells) for section in report.sections for each in section.compared]
    if report.overview is not None and max(cells) > 1:
        console.print(report.overview)
    for section in report.sections if len(report.sections) == 1 else ():
        said = "; ".join(filter(None, (section.engine, section.setting)))
        console.print(Text(said, "dim"))
        for table in section.tables:
            console.print(table)
        for words in section.words:
            console.print(Text(words, "yellow"))
