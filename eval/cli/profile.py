"""The command `ragorder profile`."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from ragorder.cli.options import Command, option, section
from ragorder.cli.values import Count, Duration, Model, Size
from ragorder.eval.cli.options import Integers, served_by
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.running.specs import Bench

if TYPE_CHECKING:
    from ragorder.trie.profile import PrefillProfile

_PLACEMENT_LIMIT_S = 100.0
# Of the limit, for the workspace of steps.
_WORKSPACE_SHARE = 0.2
# Of the limit that is left then, for the cells with which times can be fitted.
_LEAST_SHARE = 0.6


@click.command(cls=Command, examples=["ragorder profile --base-url http://127.0.0.1:8000 --loads --output p.json"])
@section(
    "Server",
    option(
        "--base-url",
        metavar="URL",
        help="An OpenAI-compatible server without other load, such as http://127.0.0.1:8000/v1.",
        unset="a vLLM server is started for the profile",
    ),
    served_by(
        Bench,
        "served_model",
        "model",
        "block_size",
        model={
            "type": Model(exists=True),
            "help": "Model of the server that is started",
            "unset": "random weights, made on the spot",
        },
        block_size={"unset": "the server's /metrics; 32 for a server that is started"},
    ),
)
@section(
    "Measurement",
    option(
        "--cached",
        type=Integers(),
        metavar="TOKENS,...",
        help="Numbers of cached tokens, rounded down to whole blocks.",
        unset="0, and a series up to half of a prompt",
    ),
    option(
        "--new",
        type=Integers(),
        metavar="TOKENS,...",
        help="Numbers of computed tokens.",
        unset="a series up to half of a prompt",
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
        type=Count(),
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of the tokens and of the order in which cells are measured.",
    ),
)
@section(
    "Tiers",
    option(
        "--loads",
        is_flag=True,
        help="Also measure the time to load a token from host memory and from disk. Needs the --base-url of a "
        "vLLM with ragorder's tiers.",
    ),
    option(
        "--loads-limit",
        type=Duration(above=True),
        default="10m",
        show_default=True,
        metavar="TIME",
        help="Stop measuring after this time, and use the measurements so far.",
    ),
)
@section(
    "Placement",
    option(
        "--placement",
        is_flag=True,
        help="Measure the costs of placements (RAGDoll) instead of prefill times: batches of the --model on the "
        "embedded engine by resident layers, searches of --index by resident partitions. An interrupted run "
        "keeps its measurements next to the output, and the next run continues.",
    ),
    option(
        "--index",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        metavar="FILE",
        help="An IVF index written by FAISS.",
        unset="generation alone",
    ),
    option("--batches", type=Integers(), metavar="N,...", help="Requests of a batch.", unset="1,4,16,64"),
    option(
        "--device-layers",
        type=Integers(),
        metavar="N,...",
        help="Layers that stay on the device.",
        unset="five numbers, from none to all",
    ),
    option("--partitions", type=Count(1), metavar="N", help="Parts of the index.", unset="32"),
    option(
        "--resident",
        type=Integers(),
        metavar="N,...",
        help="Partitions that stay in memory.",
        unset="five numbers, from none to all",
    ),
    option("--device-bytes", type=Size(1), metavar="SIZE", help="Memory of the device.", unset="what is free"),
    option("--host-bytes", type=Size(0), metavar="SIZE", help="Host memory.", unset="what is free"),
    option("--prompt-tokens", type=Count(1), metavar="N", help="Tokens of a prompt.", unset="2048"),
    option("--answer-tokens", type=Count(1), metavar="N", help="Tokens of an answer.", unset="128"),
    option(
        "--placement-limit",
        type=Duration(above=True),
        metavar="TIME",
        help="Measure large batches and repeats only as long as this allows, from the start on.",
        unset="100s",
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
    loads: bool,
    loads_limit: float,
    placement: bool,
    output: Path,
    **of_placement: Any,
) -> None:
    """Measure how long a prefill takes on an engine.

    Times are measured by cached and new tokens of the prompt; the replacement policy PGDSF weighs documents by them.
    For each cell a prefix of random tokens is sent first, so that it is cached, and then again with new tokens after
    it; the server reports whether the prefix was cached. Times that fall when tokens are added are noise: they are
    smoothed, and the report shows by how much. A profile takes minutes.

    Load times are measured with prompts that fill device and host memory until an earlier prompt has been evicted.

    With --placement, times of generation and retrieval are measured by resident layers and partitions; `ragorder
    doctor --memory --profile` then plans the placement of a model and an index.
    """
    if placement:
        if base_url is not None or loads or cached is not None or new is not None:
            raise click.UsageError("--placement runs its own engine: leave out --base-url, --loads, --cached and --new")
        _check_writable(output)
        return _profile_placement(model, output, repeats, seed, of_placement)
    if lonely := [name for name, value in of_placement.items() if value is not None]:
        raise click.UsageError(f"--{lonely[0].replace('_', '-')} requires --placement")
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.suites.profiling.measuring import measure_loads, measure_profile, plan_grid, profiled_server

    if base_url is not None and model is not None:
        raise click.UsageError("--model is for a server that is started: leave out --model or --base-url")
    if base_url is None and served_model is not None:
        raise click.UsageError("--served-model is a model of a server that is running: give --base-url")
    if loads and base_url is None:
        raise click.UsageError("--loads is for a running server with tiers: give --base-url")
    _check_writable(output)
    notes = Console(stderr=True)
    try:
        with ExitStack() as stack:
            chosen: dict[str, Any] = {"model": model, "served_model": served_model, "api_key": api_key}
            with notes.status("Starting a vLLM server") if base_url is None else nullcontext():
                server = stack.enter_context(profiled_server(base_url, **chosen, block_size=block_size))
            grid = plan_grid(server, cached, new)
            for note in grid.notes:
                notes.print(Text(note, "yellow"))
            with progress_bar() as progress:
                made = measure_profile(server, grid, repeats=repeats, seed=seed, progress=progress)
                if loads:
                    made = measure_loads(
                        server, made, repeats=repeats, seed=seed, limit_s=loads_limit, progress=progress
                    )
        _print(made)
        made.to_file(output)
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{output}: written", err=True)


def _profile_placement(model: Path | None, output: Path, repeats: int, seed: int, given: dict[str, Any]) -> None:
    from ragorder.adapters.doctor.memory import choose_budgets
    from ragorder.eval.suites.profiling.placement import Journal, PlacementGrid, measure_placement
    from ragorder.eval.suites.profiling.placement_engine import PlacedSystem
    from ragorder.pipelining.placement.base import PARTITIONS, Workload
    from ragorder.pipelining.placement.fit import PlacementError
    from ragorder.pipelining.placement.plan import plan_placement
    from ragorder.pipelining.placement.profile import PlacementProfile

    if model is None:
        raise click.UsageError("--placement needs a model: give --model, its folder")
    if given["index"] is None and (lonely := [name for name in ("partitions", "resident") if given[name] is not None]):
        raise click.UsageError(f"--{lonely[0]} needs an index: give --index")
    tokens = {name: given[name] for name in ("prompt_tokens", "answer_tokens") if given[name] is not None}
    workload = Workload(**tokens)
    batches = given["batches"] or [1, 4, 16, 64]
    part = output.with_name(output.name + ".part")
    notes = Console(stderr=True)
    limit_s, began_s = given["placement_limit"] or _PLACEMENT_LIMIT_S, time.monotonic()
    try:
        budgets = choose_budgets(given["device_bytes"], given["host_bytes"], None)
        with ExitStack() as stack:
            progress = stack.enter_context(progress_bar())
            loaded = progress("Loading the model", 1)
            system = stack.enter_context(
                PlacedSystem(
                    model,
                    given["index"],
                    budgets,
                    workload,
                    batch=max(batches, default=1),
                    partitions=given["partitions"] or PARTITIONS,
                    seed=seed,
                    limit_s=_WORKSPACE_SHARE * limit_s,
                    progress=progress,
                )
            )
            loaded()
            grid = PlacementGrid.spread(
                len(system.model.layers),
                len(system.index.partitions),
                from_host=system.engine.from_host,
                batches=batches,
                device_layers=given["device_layers"],
                resident=given["resident"],
                repeats=repeats,
            )
            identity = {
                "model": str(model.resolve()),
                "layers": list(system.model.layers),
                "index": system.index.model_dump(mode="json"),
                "workload": workload.model_dump(mode="json"),
                "step_tokens": system.engine.step_tokens,
            }
            journal = Journal(part, identity)
            if len(journal):
                notes.print(Text(f"{part}: {len(journal)} times have been measured before", "yellow"))
            left_s = limit_s - (time.monotonic() - began_s)
            # At the fewest and at the most layers on the device.
            system.engine.shorten(2 * grid.batches[:2], _LEAST_SHARE * left_s)
            left_out = measure_placement(system, grid, journal, seed=seed, limit_s=left_s, progress=progress)
            for note in left_out:
                notes.print(Text(f"left out: {note}", "yellow"))
            measured = system.engine.measured_tokens
            if measured < workload.prompt_tokens:
                note = f"of prompts of {workload.prompt_tokens:,} tokens the first {measured:,} were computed"
                notes.print(Text(f"{note} (--placement-limit)", "yellow"))
            index = None if given["index"] is None else str(given["index"])
            generation, retrieval = journal.medians()
            made = PlacementProfile(
                model=system.model,
                index=system.index,
                workload=workload,
                step_tokens=system.engine.step_tokens,
                generation=tuple(generation),
                retrieval=tuple(retrieval),
                facts={
                    "model": str(model),
                    "repeats": repeats,
                    "seed": seed,
                    "index": index,
                    "measured_prompt_tokens": measured,
                    "left_out": left_out,
                    **system.facts(),
                },
            )
        made.to_file(output)
        part.unlink(missing_ok=True)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        click.echo(plan_placement(budgets, made).explain())
    except PlacementError as error:
        click.echo(f"No placement is within the budgets: {error}", err=True)
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
    from ragorder.eval.report.words import value_words
    from ragorder.eval.suites.profiling.experiment import doubts, profile_table

    console, table = Console(), profile_table(made)
    console.print(Text(table.title, "bold"), soft_wrap=True)
    console.print(replace(table, title="", note=""))
    console.print(Text(table.note, "italic"), soft_wrap=True)
    for tier, time_s in made.loads.items():
        console.print(f"loading from {tier}: {1e6 * time_s:.3g} µs a token", soft_wrap=True)
    for doubt in doubts(made.facts):
        console.print(Text(doubt, "yellow"), soft_wrap=True)
    for name, value in made.facts["environment"].items():
        console.print(Text.assemble((f"{name}: ", "dim bold"), (value_words(name, value), "dim")), soft_wrap=True)
