"""Tables: one model for the console, Markdown and the page."""

from __future__ import annotations

import pytest
from rich.console import Console

from ragorder.eval.report.tables import Entry, Table

pytestmark = pytest.mark.merge


@pytest.fixture
def table() -> Table:
    table = Table("Cached | tokens", ["policy", "cached,\n%"], note="of <all> prompt tokens")
    table.add("retrieval [bold]order", "31.0")
    table.divide()
    table.add("free", Entry("48.2", "+17.2 [+15.0, +19.0]", "better"), tone="good")
    return table


def on_console(table: Table, width: int = 80, **options: bool) -> str:
    console = Console(width=width, **options)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_console_shows_each_text_as_it_is(table: Table) -> None:
    shown = on_console(table)
    for words in ("Cached | tokens", "retrieval [bold]order", "+17.2 [+15.0, +19.0]", "▲ better", "of <all> prompt"):
        assert words in shown


def test_nothing_is_cut_on_a_narrow_console(table: Table) -> None:
    table.add("a-name-that-is-longer-than-the-console", "1")
    shown = on_console(table, width=40)
    assert "…" not in shown
    assert "a-name-that-is" in shown


def test_a_tone_colours_the_entries_that_have_none_of_their_own() -> None:
    table = Table("", ["policy", "failed"])
    table.add("free", Entry("2", tone="bad"), tone="good")
    shown = on_console(table, force_terminal=True)
    assert "\x1b[1;32mfree" in shown
    assert "\x1b[1;31m2" in shown


def test_markdown_escapes_what_would_end_a_field(table: Table) -> None:
    assert list(table.markdown("###")) == [
        "### Cached \\| tokens\n",
        "| policy | cached, % |",
        "|---|---:|",
        "| retrieval [bold]order | 31.0 |",
        "| free | 48.2 (+17.2 [+15.0, +19.0], better) |",
        "",
        "of &lt;all> prompt tokens\n",
    ]


def test_markdown_without_a_level_has_no_title(table: Table) -> None:
    assert next(table.markdown("")) == "| policy | cached, % |"
