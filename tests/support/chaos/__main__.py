"""The command behind `make chaos`: kills, damage, restarts, and faults of the disk."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ragorder.cli.main import end_on_signals
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.server import launch_process
from support.chaos.cycles import Cycle, run_cycles
from support.chaos.scenarios import SCENARIOS, ScenarioError, run_scenario
from support.chaos.site import make_site
from support.fork_server import ForkServer


@click.command()
@click.option("--cycles", default=200, show_default=True, type=click.IntRange(min=0), help="Kills and restarts.")
@click.option(
    "--scenario",
    "names",
    multiple=True,
    type=click.Choice([*SCENARIOS, "none"]),
    help="Only these before the cycles. Repeatable. [default: all]",
)
@click.option(
    "--load",
    "load_s",
    default="2:6",
    show_default=True,
    callback=lambda context, option, value: _seconds(value),
    metavar="MIN:MAX",
    help="Seconds from the first answer of a cycle to the kill, drawn again each time.",
)
@click.option(
    "--fresh-every",
    default=20,
    show_default=True,
    type=click.IntRange(min=1),
    help="One in so many cycles starts its server in a fresh process.",
)
@click.option("--fresh-process", is_flag=True, help="All of them, and those of the scenarios: 200 take two hours more.")
@click.option("--seed", default=0, show_default=True, help="Of what is asked for and what is damaged.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON lines, one for each scenario and cycle, appended at once.",
)
def main(
    cycles: int,
    names: tuple[str, ...],
    load_s: tuple[float, float],
    fresh_every: int,
    fresh_process: bool,
    seed: int,
    output: Path | None,
) -> None:
    """Break a real vLLM server with tiers in every way, and compare each answer with one computed without any cache.

    A cycle starts a server on the folder that the last one left, loads it, kills it (SIGKILL, all its processes) in the
    middle, and flips bits in a tenth of the chunks or cuts them off. Most servers are forked from a process that has
    vLLM imported: the rest of a start, some seconds, is theirs, the disk and its lock included. Ends with status 1 if
    an answer was wrong or a server ended by itself.
    """
    wanted = [name for name in names or SCENARIOS if name != "none"]
    faults: list[str] = []
    served: list[Cycle] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-chaos-")))
        lines, bar = stack.enter_context(_Lines(output)), stack.enter_context(_bar())
        task = bar.add_task("reference", total=1 + len(wanted) + cycles)
        asked = {"cycles": cycles, "seed": seed, "load_s": load_s, "fresh_every": 1 if fresh_process else fresh_every}
        lines.write({"type": "session", **asked, "environment": describe_environment()})
        try:
            launch = launch_process if fresh_process else stack.enter_context(ForkServer()).launch
            site = make_site(folder / "model", launch=launch)
            bar.advance(task)
            for name in wanted:
                bar.update(task, description=name)
                own = folder / name
                own.mkdir()
                try:
                    found: dict[str, Any] = {"type": "scenario", "name": name, "held": True}
                    found |= run_scenario(name, site, own)
                except ScenarioError as error:
                    found |= {"held": False, "fault": str(error)}
                    faults.append(f"{name}: {error}")
                lines.write(found)
                bar.console.print(found)
                bar.advance(task)
            bar.update(task, description="cycles")
            lives = run_cycles(
                site,
                folder / "disk",
                cycles,
                seed=seed,
                load_s=load_s,
                fresh_every=fresh_every,
                advance=lambda: bar.advance(task),
            )
            for cycle in lives:
                lines.write({"type": "cycle", **asdict(cycle)})
                served.append(cycle)
                faults += [f"cycle {cycle.number}: {fault}" for fault in cycle.faults]
        except (EngineError, ImportError, OSError) as error:
            faults.append(str(error))
        except KeyboardInterrupt:
            faults.append("interrupted")
    if served:
        Console().print(_table(served))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


def _seconds(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = -1.0
    if not 0 < low <= high < math.inf:
        raise click.BadParameter(f"{text!r}: give two numbers of seconds above 0, such as 2:6")
    return low, high


class _Lines:
    """JSON lines in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> _Lines:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _table(cycles: Sequence[Cycle]) -> Table:
    """All cycles together."""
    table = Table(title=f"{len(cycles):,} kills and restarts", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    refused: dict[str, int] = {}
    for cycle in cycles:
        for reason, count in cycle.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    for words, fresh in (("fresh processes", True), ("forked ones", False)):
        starts = [cycle.start_s for cycle in cycles if cycle.fresh == fresh]
        if starts:
            table.add_row(f"{words}, mean seconds to start", f"{len(starts):,}, {fmean(starts):.1f}")
    table.add_row("right answers", f"{sum(cycle.right for cycle in cycles):,}")
    table.add_row("wrong answers", f"{sum(cycle.wrong for cycle in cycles):,}")
    table.add_row("largest difference of a logarithm", f"{max(cycle.worst for cycle in cycles):.2g}")
    table.add_row("requests in flight when killed", f"{sum(cycle.lost for cycle in cycles):,}")
    table.add_row("cached tokens", f"{sum(cycle.cached_tokens for cycle in cycles):,}")
    table.add_row("of these from the disk", f"{sum(cycle.disk_tokens for cycle in cycles):,}")
    table.add_row("chunks found at a start", f"{sum(cycle.found for cycle in cycles):,}")
    table.add_row("of these damaged", f"{sum(cycle.damaged for cycle in cycles):,}")
    for reason, count in sorted(refused.items()):
        table.add_row(f"refused: {reason}", f"{count:,}")
    return table


if __name__ == "__main__":
    end_on_signals()
    main()
