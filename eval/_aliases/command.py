"""The commands that suites had of their own, as options of `ragorder eval run`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import click

from ragorder.eval.running.record import RESULTS
from ragorder.jsonl import JSONLines

__all__ = ["run_suite", "translate"]


Spelling = Callable[[str], Sequence[str]]
"""From the value of a former option (empty: none) to options of `ragorder eval run`."""


def run_suite(
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    former: Mapping[str, Spelling] | None = None,
    defaults: Sequence[str] = (),
) -> None:
    """Run a suite with the options of its former command, and print its tables.

    A parameter of the suite's cells ("--vectors 40000") becomes "--set vectors=40000", and "--markdown FILE" the
    report; `former` translates others, and the rest are options of `ragorder eval run`. `--json` prints the records.
    Without -o the results are in a temporary folder.
    """
    from ragorder.cli.signals import end_on_sigterm
    from ragorder.eval.cli.eval import run

    end_on_sigterm()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, page = translate(name, [each for each in given if each != "--json"], former or {})
    options = [*defaults, *options]
    with TemporaryDirectory(prefix="ragorder-eval-") as temporary:
        kept = "-o" in options[:-1]
        folder = options[options.index("-o") + 1] if kept else temporary
        shown = ["ragorder", "eval", "run", name, *options, *([] if kept else ["-o", "DIR"])]
        click.echo(f"This command is now: {shlex.join(shown)}", err=True)
        try:
            with redirect_stdout(sys.stderr):
                run.main([name, *options, "-o", folder], prog_name="ragorder eval run", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        if "--json" in given:
            for _, record in JSONLines(Path(folder) / RESULTS, max_line_bytes=None).objects():
                if record.get("suite") == name:
                    click.echo(json.dumps(record, separators=(",", ":")))
        elif "--dry-run" not in options:
            _print(Path(folder), name, page)


def translate(
    name: str, arguments: Sequence[str], former: Mapping[str, Spelling] = MappingProxyType({})
) -> tuple[list[str], Path | None]:
    """Options of `ragorder eval run`, and the file for Markdown. Raises SuiteError for an unknown suite."""
    from ragorder.eval.running.experiment import experiment_of
    from ragorder.eval.running.suite import choose_suites

    (suite,) = choose_suites([name])
    parameters = experiment_of(suite.kind).cell.model_fields
    options: list[str] = []
    page = None
    for option, values in _options(arguments):
        parameter = option.removeprefix("--").replace("-", "_")
        if option in former:
            options += former[option](*values or [""])
        elif parameter in parameters:
            options += ["--set", f"{parameter}={values[0] if values else 'yes'}"]
        elif parameter.removeprefix("no_") in parameters and not values:
            options += ["--set", f"{parameter.removeprefix('no_')}=no"]
        elif parameter == "markdown" and values:
            page = Path(values[0])
        else:
            options += [{"--output": "-o"}.get(option, option), *values]
    return options, page


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    waiting = list(arguments)
    while waiting:
        option, equals, value = waiting.pop(0).partition("=")
        values = [value] if equals else []
        if not equals and option.startswith("-") and waiting and not waiting[0].startswith("-"):
            values.append(waiting.pop(0))
        yield option, values


def _print(folder: Path, name: str, page: Path | None) -> None:
    from rich.console import Console

    from ragorder.eval.report import make_report, read_results, render_markdown
    from ragorder.eval.running.suite import load_suites

    made = make_report(read_results(folder), load_suites())
    for section in made.sections:
        for table in section.tables if section.suite.name == name else ():
            Console().print(table)
        for policies, reason in section.unavailable if section.suite.name == name else ():
            click.echo(f"{policies} not available: {reason}")
    if page is not None:
        page.write_text(render_markdown(made), "utf-8")
