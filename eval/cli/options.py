"""Shared options of commands that measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ragorder.cli.options import Decorator, api_key, events_address, kv_events, option, options_from, section, together
from ragorder.cli.values import Model, ParamType, Rate
from ragorder.common.counts import parse_count
from ragorder.common.jsonl import name_of
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.running.specs import EventsAddress

if TYPE_CHECKING:
    from ragorder.eval.running.store import Store
    from ragorder.eval.running.suite import Kind


class Integers(ParamType[list[int]]):
    """Whole numbers, separated by commas."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [int(part) if part.lstrip("+-").isdecimal() else parse_count(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: give integers separated by commas, such as 0,1,2", param, ctx)


class Shares(ParamType[list[float]]):
    """Shares from 0 to 1, separated by commas."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            shares = [float(part) for part in value.split(",")]
        except ValueError:
            shares = []
        if not shares or not all(0 <= share <= 1 for share in shares):
            self.fail(f"{value!r}: give shares from 0 to 1 separated by commas, such as 0,.05,.15", param, ctx)
        return shares


class CapacityType(ParamType[Any]):
    """A cache size, read by `Capacity.parse`."""

    name = "tokens|percent|unlimited"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, Capacity) else Capacity.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


CAPACITY: dict[str, Any] = {
    "flag": "--capacity-tokens",
    "type": CapacityType(),
    "metavar": "TOKENS|PERCENT|unlimited",
}
MODEL_FOLDER: dict[str, Any] = {"type": Model(), "metavar": Model.name}
SEEDS: dict[str, Any] = {"type": Integers(), "metavar": "N,..."}
"""Attributes of options that their fields do not have."""

embedding_model = option(
    "--embedding-model", metavar="NAME", help="sentence-transformers model of the dense retriever."
)


def served_by(spec: type[Any], /, *names: str, **changes: Mapping[str, Any]) -> Decorator:
    """Return the engine's options of a specification, and --api-key."""
    attributes: dict[str, dict[str, Any]] = {
        "model": MODEL_FOLDER,
        "base_url": {"metavar": "URL"},
        "served_model": {"metavar": "NAME"},
        "capacity": CAPACITY,
        "capacity_tokens": CAPACITY,
    }
    for name in names:
        changes[name] = {**attributes.get(name, {}), **changes.get(name, {})}
    return together(options_from(spec, *names, **changes), api_key("OPENAI_API_KEY"))


def arrival_rates(prefill: str, decode: str, *, unset: tuple[str, str]) -> Decorator:
    """Return --prefill-rate and --decode-rate with these texts and defaults."""
    return together(
        option("--prefill-rate", type=Rate(), metavar="TOKENS/S", help=prefill, unset=unset[0]),
        option("--decode-rate", type=Rate(), metavar="TOKENS/S", help=decode, unset=unset[1]),
    )


events_options = section("KV events of the server (--engine openai)", kv_events())


def events_of(options: dict[str, Any]) -> EventsAddress | None:
    """Remove the options of `events_options` and return their address."""
    address = events_address(*(options.pop(name) for name in ("events_endpoint", "replay_endpoint", "events_topic")))
    return None if address is None else EventsAddress(*address)


def _add_experiments(context: click.Context, param: click.Parameter, folder: Path | None) -> None:
    from ragorder.eval.running.suite import experiments_in

    if folder is not None:
        context.with_resource(experiments_in(folder))


experiments_option = option(
    "--experiments",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder of measurements of your own, each a module with an Experiment and its suites (see CONTRIBUTING.md).",
    callback=_add_experiments,
    expose_value=False,
    is_eager=True,
)
output_option = option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, allow_dash=True, path_type=Path),
    metavar="DIR|-",
    help="Append the results to results.jsonl in this folder (the first of two equal runs counts); - writes them to "
    "standard output, and the tables to standard error.",
)


class Kept:
    """The lines of one invocation: those of a session and its records."""

    def __init__(self, store: Store | None, *, to_stdout: bool) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self._store = store
        self.to_stdout = to_stdout

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self.lines.append(line)
        if self._store is not None:
            self._store.append(line)
        if self.to_stdout:
            sys.stdout.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
            sys.stdout.flush()

    def show(self, kind: type[Kind]) -> None:
        """Print the headline and the tables of these lines. Raises ImportError naming the extra."""
        from rich.console import Console

        from ragorder.eval.report import make_report, print_summary
        from ragorder.eval.running.reading import results_of

        known = {kind.kind: kind}
        report = make_report(results_of(self.lines, known), {}, known=known)
        print_summary(report, Console(stderr=self.to_stdout, highlight=False))


@contextmanager
def kept(output: Path | None) -> Iterator[Kept]:
    """Lines are kept in the folder `output`, or written to standard output ("-"). Raises StoreError."""
    from ragorder.eval.running.store import Store

    if str(output) == "-" and sys.stdout is None:
        raise click.UsageError("standard output is closed: name a folder")
    with Store(output) if output is not None and str(output) != "-" else nullcontext() as store:
        yield Kept(store, to_stdout=str(output) == "-")


def arguments_given(command: str) -> dict[str, Any]:
    """Return the command line's options as a session records them: without keys."""
    context = click.get_current_context()
    found: dict[str, Any] = {"command": command}
    for param in context.command.params:
        name, value = param.opts[-1].lstrip("-").replace("-", "_"), context.params.get(str(param.name))
        given = context.get_parameter_source(str(param.name)) == ParameterSource.COMMANDLINE
        if given and name not in ("api_key", "output"):
            found[name] = _recorded(value)
    return found


def _recorded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_recorded(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return name_of(value) if hasattr(value, "read") else str(value)
