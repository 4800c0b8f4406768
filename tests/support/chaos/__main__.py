"""The command that `make chaos` runs: kills, damage, restarts, and faults of the disk."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ragorder.cli.main import end_on_signals
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.server import launch_process
from support.chaos.cycles import Cycle, run_cycles
from support.chaos.scenarios import SCENARIOS, ScenarioError, run_scenario
from support.chaos.site import make_site
from support.fork_server import ForkServer

_FRESH_EVERY = 20


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
    "--fresh-process",
    is_flag=True,
    help=f"Start each server in a fresh process, not one in {_FRESH_EVERY} cycles: 200 take two hours more.",
)
@click.option("--seed", default=0, show_default=True, help="Of what is asked for and what is damaged.")
def main(cycles: int, names: tuple[str, ...], load_s: tuple[float, float], fresh_process: bool, seed: int) -> None:
    """Break a real vLLM server with tiers in every way, and compare each answer with one computed without any cache.

    A cycle starts a server on the folder that the last one left, loads it, kills it (SIGKILL, all its processes) in the
    middle, and flips bits in a tenth of the chunks or cuts them off. Most servers are forked from a process that has
    vLLM imported: the rest of a start, some seconds, is theirs, the disk and its lock included. Prints a line of JSON
    for each scenario and cycle, and for all. Ends with status 1 if an answer was wrong or a server ended by itself.
    """
    faults: list[str] = []
    served: list[Cycle] = []
    fresh_every = 1 if fresh_process else _FRESH_EVERY
    _say(
        "session", cycles=cycles, seed=seed, load_s=load_s, fresh_every=fresh_every, environment=describe_environment()
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-chaos-")))
        try:
            launch = launch_process if fresh_process else stack.enter_context(ForkServer()).launch
            site = make_site(folder / "model", launch=launch)
            for name in [name for name in names or SCENARIOS if name != "none"]:
                own = folder / name
                own.mkdir()
                try:
                    _say("scenario", name=name, held=True, **run_scenario(name, site, own))
                except ScenarioError as error:
                    _say("scenario", name=name, held=False, fault=str(error))
                    faults.append(f"{name}: {error}")
            for cycle in run_cycles(site, folder / "disk", cycles, seed=seed, load_s=load_s, fresh_every=fresh_every):
                _say("cycle", **asdict(cycle))
                served.append(cycle)
                faults += [f"cycle {cycle.number}: {fault}" for fault in cycle.faults]
        except (EngineError, ImportError, OSError) as error:
            faults.append(str(error))
        except KeyboardInterrupt:
            faults.append("interrupted")
    _say("all", **_total(served))
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


def _say(type: str, **fields: Any) -> None:
    click.echo(json.dumps({"type": type, **fields}))


def _total(cycles: Sequence[Cycle]) -> dict[str, Any]:
    sums, refused = Counter[str](), Counter[str]()
    for cycle in cycles:
        found = asdict(cycle)
        counts = ("found", "damaged", "right", "wrong", "lost", "cached_tokens", "disk_tokens")
        sums.update({name: found[name] for name in counts})
        refused.update(cycle.refused)
    worst = max((cycle.worst for cycle in cycles), default=0.0)
    return {"cycles": len(cycles), **sums, "refused": dict(refused), "worst": worst}


if __name__ == "__main__":
    end_on_signals()
    main()
