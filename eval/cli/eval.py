"""The commands `ragorder eval`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import Command, CommandGroup, build, option, options_from, section
from ragorder.eval.cli.options import SEEDS, events_of, events_options, experiments_option, served_by
from ragorder.eval.cli.progress import QUIET_S, progress_bar
from ragorder.eval.cli.quality import quality
from ragorder.eval.running.options import Options

if TYPE_CHECKING:
    from ragorder.eval.running.suite import Suite

_FOLDER = {"type": click.Path(path_type=Path, file_okay=False, exists=True), "metavar": "DIR"}
_FLAG = {"is_flag": True}


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def eval() -> None:
    """Measure the evaluation's tables and figures, and report on them."""


@eval.command(cls=Command, examples=["ragorder eval schema"])
@experiments_option
def schema() -> None:
    """Print the JSON schema of a line of results.jsonl."""
    import json

    from ragorder.eval.running.record import json_schema
    from ragorder.eval.running.suite import kinds

    click.echo(json.dumps(json_schema([each.record for each in kinds().values()]), indent=2))


@eval.command(name="list", cls=Command, examples=["ragorder eval list", "ragorder eval list ragcache++"])
@click.argument("names", nargs=-1, metavar="[SUITE|GROUP]...")
@experiments_option
def list_suites(names: tuple[str, ...]) -> None:
    """List the suites by group: those of each paper, and ours.

    Suites that cannot run on this machine without options of `ragorder eval run` come last, with what they need.
    With names of suites or groups their titles, sources and sizes are listed, and what some of their cells need.
    """
    from rich.console import Console

    from ragorder.eval.report.tables import Table
    from ragorder.eval.running.cells import SuiteError
    from ragorder.eval.running.suite import GROUPS, choose_suites, experiment_of

    try:
        suites = choose_suites(names or ["all"])
    except SuiteError as error:
        raise click.ClickException(str(error)) from None
    found = {suite.name: experiment_of(suite.kind).obstacles(suite) for suite in suites}
    reasons = {name: list(dict.fromkeys(filter(None, each))) for name, each in found.items()}
    lacking = {name: reasons[name][0] for name, each in found.items() if all(each)}
    if names:
        table = Table("", ["suite", "what it shows", "source", "needs", "cells", "policies"], labels=4)
        for suite in suites:
            why = "; ".join(reasons[suite.name]) or "–"
            needs = f"in part: {why}" if reasons[suite.name] and suite.name not in lacking else why
            table.add(suite.name, suite.title, suite.source, needs, str(len(suite.points)), str(len(suite.policies)))
        tables = [table]
    else:
        here = {suite.name: suite.group for suite in suites if suite.name not in lacking}
        tables = [Table("", [heading, "suites"], labels=2) for heading in ("group", "needs")]
        for table, labels in zip(tables, (here, lacking), strict=True):
            for label in sorted(set(labels.values()), key=lambda each: (*GROUPS, each).index(each)):
                table.add(label, " ".join(name for name, each in labels.items() if each == label))
        tables[-1].note = "ragorder eval run NAME -o DIR measures one or a group; ragorder eval list NAME says more"
    Console().print(*tables)


@eval.command(
    cls=Command,
    examples=["ragorder eval run table-1 --seeds 0 -o results", "ragorder eval run ours --corpora DIR -o results"],
)
@click.argument("suites", nargs=-1, required=True, metavar="SUITE...")
@section(
    "Results",
    option(
        "-o",
        "--output",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        metavar="DIR",
        help="Folder of results.jsonl. Runs with results in it are not repeated.",
    ),
    options_from(Options, "dry_run", dry_run=_FLAG),
)
@section(
    "Runs",
    options_from(
        Options,
        "limit",
        "reduced",
        "seeds",
        "policies",
        "parameters",
        "corpora",
        "questions",
        reduced=_FLAG,
        seeds=SEEDS,
        policies={"flag": "--policy", "multiple": True, "metavar": "NAME"},
        parameters={"flag": "--set", "multiple": True, "metavar": "NAME=VALUE,..."},
        corpora=_FOLDER,
        questions=_FOLDER,
    ),
)
@section("Engine", served_by(Options, "engine", "model", "served_model", "base_url"))
@events_options
@experiments_option
def run(
    suites: tuple[str, ...],
    folder: Path,
    **options: Any,
) -> None:
    """Run suites and store the figures of every request.

    A SUITE is a name, a group of `ragorder eval list` (a paper in small letters, ours, all), or a TOML file. Policies
    alternate, request by request, each on a fresh engine.
    After an interruption the same command resumes.
    """
    from ragorder.eval.data.corpora import CorpusError
    from ragorder.eval.data.corpora.loader import corpora_in
    from ragorder.eval.engines.base import EngineError
    from ragorder.eval.running.cells import SuiteError
    from ragorder.eval.running.options import HarnessError
    from ragorder.eval.running.session import run_suites
    from ragorder.eval.running.store import Store, StoreError
    from ragorder.eval.running.suite import choose_suites, experiment_of

    events = events_of(options)
    wanted = build(Options, options | {"events": events})
    try:
        chosen = [suite.with_parameters(wanted.parameters) for suite in choose_suites(suites)]
    except SuiteError as error:
        raise click.UsageError(str(error)) from None
    if wanted.corpora is not None:
        chosen = [suite.with_corpora(corpora_in(wanted.corpora)) for suite in chosen]
    _check_policies(wanted.policies or (), chosen)
    try:
        if wanted.dry_run:
            _say_plan([suite for suite in chosen if not experiment_of(suite.kind).supports_dry_run], wanted, folder)
            chosen = [suite for suite in chosen if experiment_of(suite.kind).supports_dry_run]
            if not chosen:
                return
        with Store(folder) as store, progress_bar() as progress:
            outcome = run_suites(chosen, wanted, store, progress)
    except KeyboardInterrupt:
        click.echo("interrupted: the same command continues from here", err=True)
        raise click.exceptions.Exit(130) from None
    except (CorpusError, EngineError, HarnessError, StoreError, SuiteError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from None
    parts = [f"{outcome.runs} runs served"]
    parts += [f"{outcome.copied} copied from another suite with the same runs"] * bool(outcome.copied)
    parts += [f"{outcome.quality} lines about quality"] * bool(outcome.quality)
    parts += [f"{outcome.unavailable} unavailable (the reasons are in the results)"] * bool(outcome.unavailable)
    click.echo(f"{folder}: {', '.join(parts)}")
    _say_headline(folder)
    click.echo(f"next: ragorder report {shlex.quote(str(folder))} --html report.html")


def _say_headline(folder: Path) -> None:
    """Print headline and tables, or the extra that they need."""
    from rich.console import Console

    from ragorder.eval.report import make_report, print_summary, read_results
    from ragorder.eval.running.suite import load_suites

    try:
        with progress_bar(quiet_s=QUIET_S) as progress:
            report = make_report(read_results(folder), load_suites(), progress)
        print_summary(report, Console(highlight=False))
    except ImportError as error:
        click.echo(f"For intervals and tables: {error}", err=True)


def _check_policies(policies: Sequence[str], suites: list[Suite]) -> None:
    known = dict.fromkeys(policy for suite in suites for policy in suite.policies)
    unknown = [policy for policy in policies if policy not in known]
    if unknown:
        from ragorder.eval.data.names import choices

        raise click.UsageError(f"no suite here has a policy {unknown[0]!r}: {choices(unknown[0], known)}")


def _say_plan(suites: list[Suite], options: Options, folder: Path) -> None:
    from rich.console import Console

    from ragorder.eval.report.tables import Table
    from ragorder.eval.running.session import plan_run
    from ragorder.eval.running.store import Store
    from ragorder.eval.running.suite import experiment_of

    if not suites:
        return
    counts = {suite.name: [0, 0, 0, 0] for suite in suites}
    with Store.reading(folder) as store:
        plan = plan_run(suites, options, store)
    for job in plan.served:
        counts[job.suite.name][0] += len(job.policies)
        if experiment_of(job.suite.kind).unit == "requests":
            counts[job.suite.name][1] += job.requests * len(job.policies)
    for job in plan.copied:
        counts[job.suite.name][2] += len(job.policies)
    for missing in plan.missing:
        counts[missing.suite][3] += 1
    table = Table("", ["suite", "runs to measure", "requests", "measured in another", "unavailable"])
    table.note = "\n".join(dict.fromkeys(missing.reason for missing in plan.missing))
    for name, numbers in counts.items():
        table.add(name, *(f"{number:,}" for number in numbers))
    table.divide()
    table.add("all", *(f"{sum(column):,}" for column in zip(*counts.values(), strict=True)))
    Console().print(table)


eval.add_command(quality)
