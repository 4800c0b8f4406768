"""The command `ragorder demo`."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.cli.options import Choice, Command, Count, option, options_from
from ragorder.eval.cli.options import MODEL_FOLDER
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.running.specs import Bench, EngineName

__all__ = ["demo"]


@click.command(cls=Command)
@option(
    "--engine",
    type=Choice(["sim", "torch", "vllm"]),
    default="sim",
    show_default=True,
    help="sim: a simulated cache; torch: ragorder's embedded engine; vllm: real vLLM in this process.",
)
@options_from(
    Bench,
    "model",
    model=MODEL_FOLDER | {"help": "Model for vllm and torch", "default": "random weights, made on the spot"},
)
@option("--limit", type=Count(2), metavar="N", help="Number of questions. [default: 60; 400 with sim]")
@options_from(Bench, "waiting")
def demo(engine: EngineName, model: Path | None, limit: int | None, waiting: int | None) -> None:
    """Serve Python's documentation with and without ordering.

    Each question about the standard library is served on two equal engines, which alternate in being first: with
    documents in retrieval order, and in ragorder's order.
    """
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.report.demo import run_demo

    try:
        with progress_bar() as progress:
            report = run_demo(engine, model, limit, waiting or 0, progress)
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    report.print()
