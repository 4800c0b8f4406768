"""The report as Markdown, and on the console."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ragorder.eval.report.sections import Report, Section
from ragorder.eval.report.tables import markdown_text

__all__ = ["print_report", "print_summary", "render_markdown"]

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
