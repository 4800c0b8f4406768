"""Shared options of commands that measure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import click

from ragorder.cli.options import Decorator, api_key, events_address, kv_events, option, options_from, section, together
from ragorder.cli.values import Model, ParamType, Rate
from ragorder.common.counts import parse_count
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.running.specs import EventsAddress

__all__ = [
    "CAPACITY",
    "MODEL_FOLDER",
    "SEEDS",
    "Integers",
    "Shares",
    "arrival_rates",
    "embedding_model",
    "events_of",
    "events_options",
    "served_by",
    "to_stdout",
    "write_json",
]


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


def write_json(value: Any, output: IO[str] | None) -> None:
    if output is not None:
        json.dump(value, output, indent=1)
        output.write("\n")
        output.flush()  # click ignores a full disk when it closes the file


def to_stdout(output: IO[str] | None) -> bool:
    return output is not None and output.name == "<stdout>"
