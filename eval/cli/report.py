"""The commands `ragorder report` and `ragorder eval report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ragorder.cli.options import Command, option
from ragorder.common.jsonl import decode
from ragorder.eval.cli.progress import QUIET_S, progress_bar

if TYPE_CHECKING:
    from ragorder.eval.report import Report
    from ragorder.eval.report.sections import Section

__all__ = ["eval_report", "report"]

_EXPECTED = (
    "give a folder or results.jsonl of 'ragorder eval run' or 'ragorder eval quality', or the JSON of "
    "'ragorder bench --json' or 'ragorder replay --json'"
)


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
@option("--title", metavar="TEXT", help="Title of the report.", unset="the titles of what was measured")
def report(
    paths: tuple[Path, ...], page: Path | None, markdown: Path | None, pictures: Path | None, title: str | None
) -> None:
    """Report on results: what ordering saves.

    PATH is a folder or a results.jsonl of `ragorder eval run` or `ragorder eval quality`, or the JSON of `ragorder
    bench --json` or `ragorder replay --json`; several are combined in one report. The report begins with the saving by
    ordering, with its 95 % interval. Without --html, --markdown and --pictures it is printed.
    """
    _write(_made(paths, title), page, markdown, pictures)


@click.command(cls=Command, examples=["ragorder eval report results"])
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="The page: one file that needs no network.",
    unset="DIR/report.html",
)
@option(
    "--md",
    "markdown",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="[FILE]",
    is_flag=False,
    flag_value=Path("-"),
    help="Also write the tables in Markdown, to standard output without a file or with -.",
)
def eval_report(folder: Path, output: Path | None, markdown: Path | None) -> None:
    """Report on the results in a folder: `ragorder report DIR --html DIR/report.html`."""
    _write(_made([folder]), output or folder / "report.html", markdown)


def _made(paths: tuple[Path, ...] | list[Path], title: str | None = None) -> Report:
    from ragorder.eval.report import ResultsError, make_report, read_results
    from ragorder.eval.running.suite import load_suites

    try:
        others = {path: section for path in paths if (section := _section(path)) is not None}
        folders = [path for path in paths if path not in others]
        results = read_results(*folders) if folders else None
        with progress_bar(quiet_s=QUIET_S) as progress:
            return make_report(results, load_suites(), progress, list(others.values()), title)
    except (ResultsError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _section(path: Path) -> Section | None:
    """Return the section for a JSON file by its content, or None for results of suites.

    Raises OSError, and ResultsError for another file.
    """
    from ragorder.eval.replay.tables import is_replay, replay_section
    from ragorder.eval.report.benched import bench_section, is_bench
    from ragorder.eval.running.reading import ResultsError
    from ragorder.eval.suites.pipelining.section import is_pipelines, pipelines_section

    if path.suffix == ".xz" or not path.is_file():
        return None
    try:
        data = path.read_bytes()
        value = decode(data)
    except ValueError as error:
        if b'"type"' in data.partition(b"\n")[0]:
            return None
        raise ResultsError(f"{path} is neither JSON nor results of suites ({error}): {_EXPECTED}") from None
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return None
    readers = ((is_replay, replay_section), (is_bench, bench_section), (is_pipelines, pipelines_section))
    for known, section in readers:
        if known(value):
            return section(path, value)
    raise ResultsError(f"{path} has no results for a report: {_EXPECTED}")


def _write(made: Report, page: Path | None, markdown: Path | None, pictures: Path | None = None) -> None:
    from rich.console import Console

    from ragorder.eval.report import print_report, render_html, render_markdown

    try:
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
    except (ImportError, OSError) as error:
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
