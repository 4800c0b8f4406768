"""`python -m ragorder.eval.experiments.embedded`: what the embedded engine takes, on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ragorder.cli.signals import end_on_sigterm
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import need_torch
from ragorder.eval.experiments.embedded.clocks import threads
from ragorder.eval.experiments.embedded.prefill import MEASURES, Layout, prefill_experiments
from ragorder.eval.experiments.embedded.running import Advance, Experiment, read_lines, run
from ragorder.eval.experiments.embedded.serving import Workload, make_arms, serving_experiments
from ragorder.eval.experiments.embedded.shapes import SHAPES, find_shape
from ragorder.eval.experiments.embedded.tables import Sheet, make_sheets
from ragorder.eval.running.store import Store, StoreError
from ragorder.kernels.policies import POLICIES

__all__ = ["main"]

_ORDERS = ("retrieval", "sorted", "greedy", "best", "auto")
_FAILURES = (EngineError, StoreError, ImportError, OSError, ValueError)


def _seeds(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    try:
        return sorted({int(seed) for seed in value.split(",")})
    except ValueError:
        raise click.BadParameter(f"{value!r}: give integers with commas between them, such as 0,1,2") from None


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options of both commands, behind their own."""
    options = (
        click.option(
            "-o",
            "--output",
            "folder",
            type=click.Path(path_type=Path, file_okay=False),
            required=True,
            metavar="DIR",
            help="Where results.jsonl is kept. What is there already is not measured again.",
        ),
        click.option(
            "--shape",
            type=click.Choice(list(SHAPES)),
            default="small",
            show_default=True,
            help="Of the model, whose weights are random. Those of 7B need a GPU.",
        ),
        click.option(
            "--seeds",
            callback=_seeds,
            default="0,1,2",
            show_default=True,
            metavar="INTEGERS",
            help="Of what is drawn, with commas.",
        ),
        click.option(
            "--block-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens of a KV block."
        ),
        click.option(
            "--threads",
            "thread_count",
            default=1,
            show_default=True,
            type=click.IntRange(min=1),
            help="That compute, on a CPU. With one, CPU time can stand for time where the machine is busy.",
        ),
        click.option(
            "--markdown",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write the tables there as well, with the command and the environment.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Measure the embedded engine with random weights: times and hits depend on shapes and tokens alone.

    A run that was interrupted goes on where it stopped.
    """


@main.command()
@click.option(
    "--measure",
    "measures",
    multiple=True,
    type=click.Choice(MEASURES),
    help="cached: by how many documents are cached. overhead: with nothing cached, against plain transformers. tiers: "
    "by where all documents are cached. Repeatable. [default: all]",
)
@click.option("--documents", default=5, show_default=True, type=click.IntRange(min=1), help="Of the prompt.")
@click.option(
    "--document-tokens", default=200, show_default=True, type=click.IntRange(min=1), help="Of each of the documents."
)
@click.option("--repeats", default=20, show_default=True, type=click.IntRange(min=2), help="Turns, for each seed.")
@_common
def prefill(
    measures: tuple[str, ...],
    documents: int,
    document_tokens: int,
    repeats: int,
    shape: str,
    block_size: int,
    **options: Any,
) -> None:
    """The time to the first token of a prompt of several documents, by what of it is cached and where.

    What is compared takes turns on the same prompts, each time in another order.
    """

    def experiments() -> list[Experiment]:
        found, layout = find_shape(shape), Layout(documents, document_tokens)
        load = cache(found.make)
        return prefill_experiments(measures or MEASURES, found, layout, load, block_size=block_size, repeats=repeats)

    _measure(experiments, **options)


@main.command()
@click.option(
    "--workload",
    default="paper",
    show_default=True,
    metavar="NAME",
    help="A synthetic trace (paper, paper-shuf, zipf10, …: those of `ragorder bench`), or mmlu-like or nq-like: "
    "streams with the statistics of RAGCache's, of documents of 3,700 tokens.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Documents of a request. [default: the workload's own]")
@click.option("--requests", default=600, show_default=True, type=click.IntRange(min=12), help="Of a run.")
@click.option("--warmup", default=60, show_default=True, type=click.IntRange(min=0), help="Of these, not measured.")
@click.option(
    "--device",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="For the KV of documents: GiB, or a share of the working set (5%); the longest prompt at least.",
)
@click.option(
    "--host", "hosts", multiple=True, metavar="SIZE", help="The same behind the device, in host memory. Repeatable."
)
@click.option(
    "--replacement",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    help="By which device and host give up documents. Repeatable. [default: pgdsf]",
)
@click.option(
    "--order",
    "orders",
    multiple=True,
    type=click.Choice(_ORDERS),
    help="Of the documents in a prompt. Repeatable. [default: retrieval]",
)
@_common
def serve(
    workload: str,
    top_k: int | None,
    requests: int,
    warmup: int,
    device: str,
    hosts: tuple[str, ...],
    policies: tuple[str, ...],
    orders: tuple[str, ...],
    shape: str,
    block_size: int,
    **options: Any,
) -> None:
    """The time to the first token on a workload, by the size of the cache: without one, with the device alone, and with
    host memory behind it.

    One request at a time, on one engine after another; each has the same requests and an empty cache.
    """
    if warmup > requests - 10:
        raise click.UsageError(f"--warmup {warmup} leaves less than 10 of --requests {requests} to measure")

    def experiments() -> list[Experiment]:
        found = find_shape(shape)
        arms = make_arms(orders or ("retrieval",), hosts, policies or ("pgdsf",))
        asked = Workload(workload, requests, warmup, top_k)
        return serving_experiments(arms, asked, found, device, cache(found.make), block_size=block_size)

    _measure(experiments, **options)


def _measure(
    experiments: Callable[[], Sequence[Experiment]],
    folder: Path,
    seeds: list[int],
    thread_count: int,
    markdown: Path | None,
) -> None:
    environment = describe_environment()
    notes = Console(stderr=True)
    for name, value in environment.items():
        notes.print(Text.assemble((f"{name}: ", "dim bold"), (_words(value), "dim")), soft_wrap=True)
    try:
        need_torch()
        with threads(thread_count):
            wanted = experiments()
            with Store(folder) as store, Progress(*_COLUMNS, console=notes, auto_refresh=False, transient=True) as bar:
                run(wanted, seeds, store, _announce(bar), {"command": sys.argv[1:]})
            sheets = list(make_sheets(read_lines(wanted, seeds, folder)))
        if markdown is not None:
            markdown.write_text(_document(sheets, environment), "utf-8")
    except KeyboardInterrupt:
        raise click.ClickException("interrupted: the same command goes on from here") from None
    except _FAILURES as error:
        raise click.ClickException(str(error)) from None
    for sheet in sheets:
        Console().print(sheet.table())


# Between what is timed, not meanwhile.
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def _announce(bar: Progress) -> Callable[[str, int], Advance]:
    def announce(description: str, steps: int) -> Advance:
        task = bar.add_task(description, total=steps)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        return advance

    return announce


def _document(sheets: Sequence[Sheet], environment: Mapping[str, object]) -> str:
    command = shlex.join(["python", "-m", "ragorder.eval.experiments.embedded", *sys.argv[1:]])
    facts = "; ".join(f"{name} {_words(value)}" for name, value in environment.items())
    return "\n".join([*(sheet.markdown() for sheet in sheets), f"```\n{command}\n```\n", f"{facts}\n"])


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    end_on_sigterm()
    main()
