"""The command `ragorder profile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragorder.cli.options import Command, Count, option, section
from ragorder.eval.cli.options import Integers, served_by
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.running.specs import Bench

if TYPE_CHECKING:
    from ragorder.kernels.profile import PrefillProfile

__all__ = ["profile"]

_WIDE_SPREAD = 0.25


@click.command(cls=Command)
@section(
    "Server",
    option(
        "--base-url",
        metavar="URL",
        help="An OpenAI-compatible server without other load, such as http://127.0.0.1:8000/v1. [default: a vLLM "
        "server is started for the profile]",
    ),
    served_by(
        Bench,
        "served_model",
        "model",
        "block_size",
        model={
            "type": click.Path(path_type=Path, exists=True, file_okay=False),
            "help": "Model of the server that is started",
            "default": "random weights, made on the spot",
        },
        block_size={"default": "the server's /metrics; 32 for a server that is started"},
    ),
)
@section(
    "Measurement",
    option(
        "--cached",
        type=Integers(),
        metavar="TOKENS,...",
        help="Numbers of cached tokens, rounded down to whole blocks. [default: 0, and a series up to half of a "
        "prompt]",
    ),
    option(
        "--new",
        type=Integers(),
        metavar="TOKENS,...",
        help="Numbers of computed tokens. [default: a series up to half of a prompt]",
    ),
    option(
        "--repeats",
        type=Count(1),
        default=5,
        show_default=True,
        metavar="N",
        help="Measure each cell N times, in rounds, and take the median.",
    ),
    option(
        "--seed",
        formerly=["--seeds"],
        type=Count(),
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of the tokens and of the order in which cells are measured.",
    ),
)
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.json",
    help="File of the profile.",
)
def profile(
    base_url: str | None,
    served_model: str | None,
    api_key: str | None,
    model: Path | None,
    cached: list[int] | None,
    new: list[int] | None,
    block_size: int | None,
    repeats: int,
    seed: int,
    output: Path,
) -> None:
    """Measure how long a prefill takes on an engine.

    Times are measured by the number of cached tokens and of new tokens in the prompt; the replacement policy PGDSF
    weighs documents by them. For each cell a prefix of random tokens is sent first, so that it is cached, and then
    again with new tokens behind it; the server's answer says whether the prefix was cached. Times that fall although
    tokens are added are noise: they are smoothed, and the report shows by how much. It takes minutes.
    """
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.experiments.profiling.measuring import find_profiled, measure_profile, own_server, plan_grid

    if base_url is not None and model is not None:
        raise click.UsageError("--model is for a server that is started: leave out --model or --base-url")
    if base_url is None and served_model is not None:
        raise click.UsageError("--served-model is a model of a server that is running: give --base-url")
    _check_writable(output)
    notes = Console(stderr=True)
    try:
        with ExitStack() as stack:
            if base_url is None:
                with notes.status("Starting a vLLM server"):
                    started = stack.enter_context(own_server(model, block_size=block_size))
                base_url, api_key = started.base_url, None
            server = find_profiled(base_url, served_model=served_model, api_key=api_key, block_size=block_size)
            grid = plan_grid(server, cached, new)
            for note in grid.notes:
                notes.print(Text(note, "yellow"))
            with progress_bar() as progress:
                made = measure_profile(server, grid, repeats=repeats, seed=seed, progress=progress)
        _print(made)
        made.to_file(output)
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{output}: written", err=True)


def _check_writable(path: Path) -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}: give another --output") from None


def _print(made: PrefillProfile) -> None:
    console, facts = Console(), made.facts
    title = f"{facts['model']} on {facts['engine']}: ms to the first token, new tokens a second"
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(_table(made))
    typical, largest = (100 * facts["spread_share"][name] for name in ("median", "largest"))
    spread = f"median of {facts['repeats']}, which spread by {typical:.0f} % of it (in one cell {largest:.0f} %)"
    how = f"{spread}, seed {facts['seed']}, blocks of {facts['block_size']} tokens"
    console.print(Text(how, "italic"), soft_wrap=True)
    for doubt in _doubts(facts):
        console.print(Text(doubt, "yellow"), soft_wrap=True)
    for name, value in facts["environment"].items():
        console.print(Text.assemble((f"{name}: ", "dim bold"), (_words(value), "dim")), soft_wrap=True)


def _doubts(facts: Mapping[str, Any]) -> Iterator[str]:
    pooled, again = facts["pooled"], facts["sent_again"]
    if facts["spread_share"]["median"] > _WIDE_SPREAD:
        yield "times differ much between repeats: measure again on an idle server and machine"
    if pooled["cells"]:
        size = f"{pooled['cells']} cells, by {100 * pooled['largest_share']:.1f} % at most"
        yield f"evened out, because times fell although tokens were added: {size}"
    if again:
        yield f"requests repeated, because they failed or found something else cached: {again}"


def _table(made: PrefillProfile) -> Table:
    table = Table(show_lines=True)
    table.add_column("cached", justify="right", style="bold", no_wrap=True)
    for new in made.new_tokens:
        table.add_column(f"{new:,} new", justify="right", no_wrap=True)
    best = max(new / s for row in made.seconds for new, s in zip(made.new_tokens, row, strict=True))
    for cached, row in zip(made.cached_tokens, made.seconds, strict=True):
        cells = [_cell(1e3 * s, new / s, best) for new, s in zip(made.new_tokens, row, strict=True)]
        table.add_row(f"{cached:,}", *cells)
    return table


def _cell(ms: float, rate: float, best: float) -> Text:
    colour = "green" if 3 * rate >= 2 * best else "yellow" if 3 * rate >= best else "red"
    return Text.assemble((f"{ms:,.1f}", "bold"), "\n", (f"{rate:,.0f}/s", colour))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
