"""`ragorder demo`: real questions on real documents, in retrieval order and in ours."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.eval.cli.progress import progress_bar

__all__ = ["demo"]


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["vllm", "torch", "sim"]),
    default="vllm",
    show_default=True,
    help="Real vLLM in this process, ragorder's embedded engine, or a simulated cache.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Model folder for vllm and torch. [default: random weights, made on the spot]",
)
@click.option("--limit", type=click.IntRange(min=2), default=60, show_default=True, help="So many questions.")
@click.option(
    "--waiting",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="So many of the next requests already wait when one is ordered.",
)
def demo(engine: str, model: Path | None, limit: int, waiting: int) -> None:
    """Serve Python's documentation with and without ordering.

    Each question about the standard library is served twice, on two equal engines that take turns in being first: with
    documents in retrieval order, and in ragorder's order.
    """
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.running.demo import run_demo

    try:
        with progress_bar() as progress:
            report = run_demo(engine, model, limit, waiting, progress)
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    report.print()
