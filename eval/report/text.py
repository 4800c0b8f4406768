"""The report's tables in Markdown, for a README or docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator

from ragorder.eval.report.sections import STATISTICS, Report, Section
from ragorder.eval.report.tables import markdown_text

__all__ = ["render_markdown"]


def render_markdown(report: Report) -> str:
    """GitHub's Markdown, one table after another."""
    return "\n".join(_lines(report)).strip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {report.title}\n\n{report.measured}. {STATISTICS}\n"
    yield from report.overview.markdown("##")
    yield "## The paper's trace, honestly\n"
    yield from (f"{markdown_text(words)}\n" for words in report.finding)
    if report.side_by_side is not None:
        yield from report.side_by_side.markdown("")
    yield "## What was not measured\n"
    yield from (f"- {markdown_text(words)}" for words in report.not_measured)
    yield ""
    for section in report.sections:
        yield from _section(section)
    if report.checks is not None:
        yield from report.checks.markdown("##")
    yield "## To repeat it\n\n```"
    yield from report.commands
    yield "```\n"
    yield from report.sessions.markdown("##")
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
