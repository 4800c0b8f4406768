"""Progress and results of a build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ragorder.cli.fuse_stats import disk_gib
from ragorder.cli.options import spelling

if TYPE_CHECKING:
    from ragorder.kernels.preprocessing.builder import FusionBuilder

__all__ = ["compute", "say_damaged", "say_ready", "working"]


@contextmanager
def working(on: str) -> Iterator[None]:
    with Console(stderr=True).status(on):
        yield


def compute(builder: FusionBuilder, shard: tuple[int, int]) -> None:
    estimate = builder.estimate(shard)
    click.echo(
        f"{estimate.documents:,} documents to compute, {estimate.tokens:,} tokens: {estimate.bytes:,} bytes",
        err=True,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("documents", total=estimate.bytes)
        for number, built in enumerate(builder.build(shard), 1):
            bar.update(task, advance=built.bytes, description=f"document {number:,} of {estimate.documents:,}")


def say_damaged(builder: FusionBuilder) -> None:
    with working("checking what is there"):
        builder.verify()
    if damaged := sum(builder.damaged.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in builder.damaged.items())
        click.echo(f"{damaged:,} damaged ({reasons}): computed again", err=True)


def say_ready(builder: FusionBuilder, recipe: Mapping[str, Any]) -> None:
    left = builder.estimate()
    size = builder.size
    click.echo(
        f"{len(builder) - left.documents:,} of {len(builder):,} documents are in {builder.folder}: {size:,} bytes"
    )
    if left.documents:
        click.echo(f"{left.documents:,} are missing")
    else:
        identical = "".join(
            f" {spelling(name)} {recipe[name]}" for name in ("block_size", "dtype", "device") if name in recipe
        )
        click.echo(
            f"ragorder serve --engine torch --model {recipe['model']}{identical} --reuse fused "
            f"--disk-path {builder.folder} --disk-bytes {disk_gib(size)}GiB"
        )
