"""The command `ragorder plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from ragorder.cli.options import Command, option, section
from ragorder.cli.planning.requests import document_tokens_option, warn_of
from ragorder.cli.values import Count, Size, StreamFile
from ragorder.common.request_lines import UnreadFields

if TYPE_CHECKING:
    from ragorder.cli.planning.run import Progress


@click.command(
    cls=Command,
    examples=[
        "ragorder plan requests.jsonl -o plan/",
        "ragorder plan requests.jsonl.gz -o plan/ --shards 8 --memory 16GiB",
    ],
)
@click.argument("requests", type=StreamFile("rb"), default="-")
@section(
    "Plan",
    option(
        "-o",
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        metavar="DIR",
        help="Folder of the shards and their manifest.",
    ),
    option(
        "--shards",
        type=Count(1, 99_999),
        metavar="N",
        help="Number of files, with about equally many tokens.",
        unset="the least that keeps a file below a million documents",
    ),
    document_tokens_option(),
)
@section(
    "Run",
    option("--workers", type=Count(1), metavar="N", help="Processes that plan.", unset="one for each core"),
    option(
        "--memory",
        "memory_bytes",
        type=Size(1 << 28),
        default="4GiB",
        show_default=True,
        metavar="SIZE",
        help="Memory for all processes together.",
    ),
)
def plan(
    requests: IO[bytes],
    out: Path,
    shards: int | None,
    document_tokens: int,
    workers: int | None,
    memory_bytes: int,
) -> None:
    """Plan a batch of any size in shards, each a file in serving order.

    REQUESTS has JSON lines as for `ragorder replay` and `ragorder order`, plain or gzipped, or is - for standard input;
    "time" is not needed. A shard has requests that share documents, in the order in which one engine should serve them,
    as the lines that `ragorder order` writes: fields are repeated, so results are joined by an id among them or by
    "index". "prefix_documents" and "cached_tokens" count what a request shares with the line before. Requests of
    different tenants, or with prefixes of different lengths, share nothing.

    Memory is bounded; the disk holds the requests' numbers and fields meanwhile, but no texts. `manifest.json` is
    written last: without it the plan is not whole.
    """
    from ragorder.cli.planning.run import PlanOptions, plan_file

    unread = UnreadFields()
    options = PlanOptions(shards, document_tokens, memory_bytes, workers or _cores())
    with _shown() as progress:
        manifest = plan_file(requests, out, options, unread, progress)
    warn_of(unread)
    tokens, saved = manifest["tokens"], manifest["saved_tokens"]
    click.echo(
        f"{manifest['requests']:,} requests in {len(manifest['shards']):,} shards in {out}: of {tokens:,} tokens of "
        f"documents {saved:,} ({100 * saved / max(1, tokens):.1f} %) are shared with the request before"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _shown() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda label, steps: lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ProgressBars(*columns, console=console, transient=True) as bars:

        def start(label: str, steps: int) -> Callable[[], None]:
            return partial(bars.advance, bars.add_task(label, total=steps))

        yield start
