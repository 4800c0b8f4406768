"""The command `ragorder report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ragorder.cli.options import Command, option
from ragorder.eval.cli.options import experiments_option
from ragorder.eval.cli.progress import QUIET_S, progress_bar

if TYPE_CHECKING:
    from ragorder.eval.report import Report


@click.command(cls=Command, examples=["ragorder report results", "ragorder report results --html report.html"])
@click.argument("paths", metavar="PATH…", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the report as an HTML page in one file that needs no network.",
)
@option(
    "--markdown",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE|-",
    help="Write the report in Markdown, to standard output with -.",
)
@option(
    "--pictures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the pictures of the page into this folder, as SVG.",
)
@experiments_option
@option("--title", metavar="TEXT", help="Title of the report.", unset="the titles of what was measured")
def report(
    paths: tuple[Path, ...], page: Path | None, markdown: Path | None, pictures: Path | None, title: str | None
) -> None:
    """Report on results: what ordering saves.

    PATH is a folder with a results.jsonl of `ragorder eval run`, `ragorder eval quality`, `ragorder bench` or `ragorder
    replay`, or such a file; several are combined in one report. The report begins with the saving by ordering, with its
    95 % interval. Without --html, --markdown and --pictures it is printed.
    """
    from rich.console import Console

    from ragorder.eval.report import ResultsError, make_report, print_report, read_results, render_html, render_markdown
    from ragorder.eval.running.suite import load_suites

    try:
        with progress_bar(quiet_s=QUIET_S) as progress:
            made = make_report(read_results(*paths), load_suites(), progress, title)
        if page is not None:
            with progress_bar(quiet_s=QUIET_S) as progress:
                page.write_text(render_html(made, progress), "utf-8")
            click.echo(f"wrote {page}", err=True)
        if markdown is not None and str(markdown) == "-":
            click.echo(render_markdown(made), nl=False)
        elif markdown is not None:
            markdown.write_text(render_markdown(made), "utf-8")
            click.echo(f"wrote {markdown}", err=True)
        if pictures is not None:
            _write_pictures(made, pictures)
        if page is None and markdown is None and pictures is None:
            print_report(made, Console(highlight=False))
    except (ResultsError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _write_pictures(made: Report, folder: Path) -> None:
    from ragorder.eval.report.canvas import standalone

    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with progress_bar(quiet_s=QUIET_S) as progress:
        advance = progress("drawing", len(made.sections))
        for section in made.sections:
            for number, picture in enumerate(section.pictures, 1):
                (folder / f"{section.suite.name}-{number}.svg").write_text(standalone(picture), "utf-8")
                count += 1
            advance()
    click.echo(f"wrote {count} pictures into {folder}", err=True)
