"""The command `ragorder workflow`."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.cli.options import Command, CommandGroup, option
from ragorder.cli.output import show_figures
from ragorder.common.jsonl import JSONLinesError
from ragorder.eval.report.wavefront import FORMATS, draw_wavefront, figures_of, read_traces


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def workflow() -> None:
    """Inspect workflows of searches and generations."""


@workflow.command(cls=Command, examples=["ragorder workflow trace trace.jsonl --plot wavefront.svg"])
@click.argument("traces", metavar="TRACE.jsonl", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Draw the wavefront, one row for each request, into a file with the ending {', '.join(FORMATS)}.",
)
@option(
    "--requests",
    "limit",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    metavar="N",
    help="Draw at most N requests.",
)
@option(
    "--first",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="First request to draw, in the order of their starts.",
)
@option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
def trace(traces: Path, plot: Path | None, limit: int, first: int, as_json: bool) -> None:
    """Show when the nodes of workflows ran, and how many speculative runs were used.

    TRACE.jsonl has a line for each request, as written by a TraceLog. It has no texts.
    """
    try:
        requests = read_traces(traces)
        if plot is not None:
            draw_wavefront(requests[first - 1 : first - 1 + limit], plot, first=first)
        show_figures(lambda: figures_of(requests), None, as_json)
    except (ImportError, ValueError, JSONLinesError) as error:
        raise click.ClickException(str(error)) from None
    if plot is not None:
        click.echo(f"wrote {plot}", err=True)
