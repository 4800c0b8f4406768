"""The command `ragorder eval report`."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.cli.options import Command, option
from ragorder.eval.cli.progress import progress_bar

__all__ = ["report"]


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="The page: one file that needs no network and no script. [default: DIR/report.html]",
)
@option(
    "--md",
    "markdown",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="[FILE]",
    is_flag=False,
    flag_value=Path("-"),
    help="Also the same tables in Markdown; without a file, or with -, on standard output.",
)
def report(folder: Path, output: Path | None, markdown: Path | None) -> None:
    """Report on the results in a folder.

    DIR holds the results of `ragorder eval run`. The page shows the tables with the papers' numbers beside ours,
    differences with their confidence intervals, pictures, the environment, and what was not measured.
    """
    from ragorder.eval.report import ResultsError, make_report, read_results, render_html, render_markdown
    from ragorder.eval.running.suite import load_suites

    try:
        results = read_results(folder)
        page = output or folder / "report.html"
        with progress_bar() as progress:
            made = make_report(results, load_suites(), progress)
            page.write_text(render_html(made, progress), "utf-8")
        click.echo(f"wrote {page}", err=True)
        if markdown is not None:
            if str(markdown) == "-":
                click.echo(render_markdown(made), nl=False)
            else:
                markdown.write_text(render_markdown(made), "utf-8")
                click.echo(f"wrote {markdown}", err=True)
    except (ResultsError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from None
