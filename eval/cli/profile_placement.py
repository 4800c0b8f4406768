"""Option `--placement` of `ragorder profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ragorder.cli.options import Decorator, option, section
from ragorder.cli.values import Count, Size
from ragorder.eval.cli.options import Integers
from ragorder.eval.cli.progress import progress_bar

__all__ = ["PLACEMENT_OPTIONS", "placement_options", "profile_placement"]

PLACEMENT_OPTIONS = (
    "index",
    "batches",
    "device_layers",
    "partitions",
    "resident",
    "device_bytes",
    "host_bytes",
    "prompt_tokens",
    "answer_tokens",
)
"""Parameters that require `--placement`."""


def placement_options() -> Decorator:
    return section(
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
    )


def profile_placement(model: Path | None, output: Path, repeats: int, seed: int, given: dict[str, Any]) -> None:
    """Measure and write the profile. `given`: values of PLACEMENT_OPTIONS, or None."""
    from ragorder.adapters.doctor.memory import choose_budgets
    from ragorder.eval.suites.profiling.placement import Journal, PlacementGrid, measure_placement
    from ragorder.eval.suites.profiling.placement_engine import PlacedSystem
    from ragorder.pipelining.placement.base import Workload
    from ragorder.pipelining.placement.plan import PlacementError, plan_placement
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
    try:
        budgets = choose_budgets(given["device_bytes"], given["host_bytes"], None)
        with notes.status("Loading the model"):
            system = PlacedSystem(
                model,
                given["index"],
                budgets,
                workload,
                batch=max(batches, default=1),
                partitions=given["partitions"] or 32,
                seed=seed,
            )
        with system:
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
            with progress_bar() as progress:
                left_out = measure_placement(system, grid, journal, seed=seed, progress=progress)
            for note in left_out:
                notes.print(Text(f"left out: {note}", "yellow"))
            generation, retrieval = journal.medians()
            made = PlacementProfile(
                model=system.model,
                index=system.index,
                workload=workload,
                step_tokens=system.engine.step_tokens,
                generation=tuple(generation),
                retrieval=tuple(retrieval),
                facts={"model": str(model), "repeats": repeats, "seed": seed, "left_out": left_out, **system.facts()},
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
