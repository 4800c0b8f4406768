"""The command `ragorder demo`."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.cli.options import Command, option, options_from
from ragorder.cli.values import Choice, Count
from ragorder.eval.cli.options import MODEL_FOLDER
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.running.specs import Bench, EngineName


@click.command(cls=Command, examples=["ragorder demo --engine sim", "ragorder demo --model smollm2"])
@option(
    "--engine",
    type=Choice(["sim", "torch", "vllm"]),
    default="torch",
    show_default=True,
    help="torch: ragorder's embedded engine; vllm: real vLLM in this process; sim: a simulated cache, without answers "
    "or times.",
)
@options_from(
    Bench,
    "model",
    model=MODEL_FOLDER | {"help": "Model for torch and vllm", "unset": "smollm2"},
)
@option("--limit", type=Count(2), metavar="N", help="Only the first N questions.", unset="all 18")
@options_from(Bench, "waiting")
def demo(engine: EngineName, model: Path | None, limit: int | None, waiting: int | None) -> None:
    """Answer questions about Python with and without ordering.

    A small real model (SmolLM2-135M-Instruct) answers each question twice, from documents in retrieval order and in
    ragorder's order, on two equal engines that take turns in being first.
    """
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.report.demo import run_demo

    try:
        with progress_bar() as progress:
            report = run_demo(engine, model, limit, waiting or 0, progress, lambda text: click.echo(text, err=True))
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    report.print()
