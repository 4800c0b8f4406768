"""`python -m ragorder.eval.tiering`: the time to the first token with tiers and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ragorder.eval.cache import cache_folder
from ragorder.eval.corpora import Corpus, CorpusError, load_folder, load_pydocs
from ragorder.eval.ending import end_on_sigterm
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.vllm import has_fast_bfloat16
from ragorder.eval.harness.store import Store, StoreError
from ragorder.eval.serving import built_prompts, random_model
from ragorder.eval.tiering.cells import CELLS, kv_bytes_per_token, make_cells
from ragorder.eval.tiering.requests import Stream, make_stream
from ragorder.eval.tiering.running import Plan, read_lines, run
from ragorder.eval.tiering.tables import tiering_table
from ragorder.eval.trace import trace_of_corpus

__all__ = ["main"]

_CORPUS = "bing_covid_cord"


@click.command()
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where results.jsonl is kept. What is there already is not measured again.",
)
@click.option(
    "--corpora",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder with a folder for each real corpus. [default: none, pydocs is measured]",
)
@click.option("--corpus", default=_CORPUS, show_default=True, metavar="NAME", help="Which of them.")
@click.option("--cell", "names", multiple=True, type=click.Choice(CELLS), help="Only these. Repeatable.")
@click.option("--seeds", default="0,1,2", show_default=True, help="Of the draw of requests, with commas.")
@click.option("--requests", default=240, show_default=True, type=click.IntRange(min=12), help="Of a run.")
@click.option("--warmup", default=160, show_default=True, type=click.IntRange(min=0), help="Of these, not measured.")
@click.option("--segment", default=10, show_default=True, type=click.IntRange(min=1), help="Requests in a turn.")
@click.option("--top-k", default=2, show_default=True, type=click.IntRange(min=1), help="Documents of a request.")
@click.option("--block-size", default=32, show_default=True, type=click.IntRange(min=1), help="Tokens of a block.")
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), help="Its folder. [default: random weights, made here]"
)
@click.option("--policy", default="pgdsf", show_default=True, help="By which the tiers give up chunks.")
@click.option(
    "--device-order/--no-device-order", default=True, show_default=True, help="By that policy in the device, too."
)
@click.option("--dry-run", is_flag=True, help="Say what would be measured, and measure nothing.")
def main(
    folder: Path,
    corpora: Path | None,
    corpus: str,
    names: tuple[str, ...],
    seeds: str,
    requests: int,
    warmup: int,
    segment: int,
    top_k: int,
    block_size: int,
    model: Path | None,
    policy: str,
    device_order: bool,
    dry_run: bool,
) -> None:
    """Measure the time to the first token on real vLLM servers, with tiers and with the prefix cache alone.

    Four cells: the working set of the requests fits the device's pool; is four times as large and fits the host; is
    twice as large as the host; the same with a disk. A run that was interrupted goes on where it stopped.
    """
    drawn = _seeds(seeds)
    if warmup > requests - 10:
        raise click.UsageError(f"--warmup {warmup} leaves less than 10 of --requests {requests} to measure")
    try:
        loaded = load_pydocs(cache=cache_folder()) if corpora is None else load_folder(corpora / corpus)
        model = model or random_model()
        streams = {seed: _stream(loaded, model, seed, requests, top_k, block_size) for seed in drawn}
        cells = make_cells(
            names or CELLS,
            list(streams.values()),
            block_size=block_size,
            bytes_per_token=_bytes_per_token(model),
        )
        plan = Plan(
            model=model,
            cells=cells,
            streams=streams,
            block_size=block_size,
            warmup=warmup,
            segment=segment,
            settings={"policy": policy, "device_order": device_order},
            facts={"corpus": loaded.name, "top_k": top_k, "requests": requests, "model": model.name},
        )
        Console(stderr=True).print(_plan_table(plan))
        if dry_run:
            return
        with Store(folder) as store, _progress_bar() as progress:
            run(plan, store, progress)
    except KeyboardInterrupt:
        raise click.ClickException("interrupted: the same command goes on from here") from None
    except (CorpusError, EngineError, StoreError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    Console().print(tiering_table(read_lines(plan, folder)))


def _seeds(text: str) -> list[int]:
    try:
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise click.UsageError(f"--seeds {text!r}: give integers with commas between them, such as 0,1,2") from None


def _stream(corpus: Corpus, model: Path, seed: int, requests: int, top_k: int, block_size: int) -> Stream:
    """Requests drawn from a corpus's real ones: popular documents stay as popular as they are."""
    trace = trace_of_corpus(corpus, top_k=top_k, order="random", seed=seed, limit=requests)
    return make_stream(trace, built_prompts(model), block_size)


def _bytes_per_token(model: Path) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return kv_bytes_per_token(config, 2 if has_fast_bfloat16() else 4)


def _plan_table(plan: Plan) -> Table:
    sizes: Sequence[int] = [stream.working_set_tokens for stream in plan.streams.values()]
    title = f"{plan.facts['corpus']}: {plan.facts['requests']} requests, {min(sizes):,} to {max(sizes):,} tokens of KV"
    table = Table(title=title)
    table.add_column("cell")
    for heading in ("device, tokens", "host, MB", "disk, MB"):
        table.add_column(heading, justify="right")
    for cell in plan.cells:
        disk = "–" if cell.disk_bytes is None else f"{cell.disk_bytes / 1e6:,.0f}"
        table.add_row(cell.name, f"{cell.blocks * plan.block_size:,}", f"{cell.host_bytes / 1e6:,.0f}", disk)
    return table


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:

        def announce(description: str, steps: int) -> Callable[[], None]:
            task = bar.add_task(description, total=steps)
            return lambda: bar.advance(task)

        yield announce


if __name__ == "__main__":
    end_on_sigterm()
    main()
