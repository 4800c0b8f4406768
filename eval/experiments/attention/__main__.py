"""`python -m ragorder.eval.experiments.attention`: our attention kernel against SDPA (flash, cuDNN) and FlexAttention.

Needs a GPU to time anything. Without one it checks small shapes: the reference in torch, and the kernel, too, if
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import torch
from rich.console import Console
from rich.progress import track

from ragorder.eval.data.machine import describe_environment
from ragorder.eval.experiments.attention.contenders import CONTENDERS
from ragorder.eval.experiments.attention.measuring import Row, measure, splits_of
from ragorder.eval.experiments.attention.shapes import DTYPES, make_shapes
from ragorder.eval.experiments.attention.tables import markdown, missing_lines, table

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class _Grid:
    """What is measured unless it is said."""

    batches: Sequence[int]
    queries: Sequence[int]
    contexts: Sequence[int]
    heads: Sequence[tuple[int, int]]
    head_dims: Sequence[int]


_ON_GPU = _Grid((1, 8), (32, 256, 1024, 4096), (0, 2048, 8192, 32_768), ((32, 8), (32, 32)), (64, 128))
_ON_CPU = _Grid((1, 2), (5, 33), (0, 70), ((4, 2),), (64, 80))


def _read_heads(_context: object, _option: object, values: Sequence[str]) -> list[tuple[int, int]]:
    pairs = []
    for value in values:
        queries, _, keys = value.partition("/")
        if not (queries.isdigit() and keys.isdigit() and int(keys) and int(queries) and not int(queries) % int(keys)):
            raise click.BadParameter(f"{value!r}: give query heads and KV heads such as 32/8")
        pairs.append((int(queries), int(keys)))
    return pairs


@click.command()
@click.option("--query", "queries", multiple=True, type=click.IntRange(min=1), help="New tokens a request.")
@click.option("--context", "contexts", multiple=True, type=click.IntRange(min=0), help="Cached tokens a request.")
@click.option("--heads", multiple=True, callback=_read_heads, help="Query heads and KV heads: 32/8.")
@click.option("--head-dim", "head_dims", multiple=True, type=click.IntRange(min=1), help="A head's dimensions.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), help="Requests, all alike.")
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="bf16", show_default=True, help="Of all tensors.")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens a block.")
@click.option(
    "--contender",
    "names",
    multiple=True,
    type=click.Choice([contender.name for contender in CONTENDERS]),
    help="Who is measured.  [default: all]",
)
@click.option("--repeats", type=click.IntRange(min=30), default=50, show_default=True, help="Times each is timed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tensors.")
@click.option("-o", "--output", type=click.File("w"), help="A line of JSON for each shape and contender.")
@click.option("--markdown", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write this page, too.")
def main(
    queries: Sequence[int],
    contexts: Sequence[int],
    heads: Sequence[tuple[int, int]],
    head_dims: Sequence[int],
    batches: Sequence[int],
    dtype: str,
    block_size: int,
    names: Sequence[str],
    repeats: int,
    seed: int,
    output: IO[str] | None,
    page: Path | None,
) -> None:
    """Check our attention kernel and others against the reference, and time them all if there is a GPU.

    Shapes are all combinations of --batch, --head-dim, --heads, --context and --query; on a GPU the grid is 128 of
    them unless they are given. Ends with 1 if a result is wrong.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed = device.type == "cuda"
    named = torch.cuda.get_device_name(device) if timed else "a CPU"
    environment = {**describe_environment(), "device": named}
    default = _ON_GPU if timed else _ON_CPU
    shapes = list(
        make_shapes(
            batches or default.batches,
            queries or default.queries,
            contexts or default.contexts,
            heads or default.heads,
            head_dims or default.head_dims,
            dtype,
            block_size,
        )
    )
    contenders = [contender for contender in CONTENDERS if not names or contender.name in names]
    console = Console(stderr=True)
    rows: list[Row] = []
    for shape in track(shapes, "shapes", console=console, transient=True):
        for row in measure(shape, contenders, device=device, repeats=repeats, seed=seed):
            rows.append(row)
            if output is not None:
                facts = {**row.as_json(), "splits": splits_of(shape, device), "seed": seed, "environment": environment}
                output.write(json.dumps(facts) + "\n")
                output.flush()
        if timed:
            torch.cuda.empty_cache()
    Console().print(table(rows))
    for line in missing_lines(rows):
        click.echo(line)
    click.echo(", ".join(f"{name}: {value}" for name, value in environment.items()))
    if not timed:
        click.echo("Nothing was timed: there is no GPU. Results were held against the reference.")
    if page is not None:
        command = " ".join(["python -m ragorder.eval.experiments.attention", *sys.argv[1:]])
        page.write_text(markdown(rows, environment, command, named, timed), "utf-8")
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(rows)} results are wrong")


if __name__ == "__main__":
    main()
