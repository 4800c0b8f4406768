"""Options of a command from a file, and from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ragorder.cli.options import Decorator, Option, option
from ragorder.jsonl import decode_toml

__all__ = ["config_option", "with_environment"]


def with_environment(prefix: str) -> Callable[[click.Command], click.Command]:
    """A variable for each option of a command that has none: `prefix` and the option's name."""

    def decorate(command: click.Command) -> click.Command:
        for param in command.params:
            if isinstance(param, Option) and param.envvar is None and param.variable is None:
                param.envvar = f"{prefix}_{_names(param)[0].upper()}"
                param.is_own_variable = True
        return command

    return decorate


def config_option() -> Decorator:
    """--config: a TOML file with options of the command, by their names."""

    def read(context: click.Context, param: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.default_map = {**(context.default_map or {}), **_read(context.command, path)}

    return option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read,
        help='Options from this file in TOML, such as read-timeout = "60s" or upstream = ["http://HOST:8000"].',
    )


def _read(command: click.Command, path: Path) -> dict[str, Any]:
    """Values by parameter. Raises click.UsageError."""
    try:
        values = decode_toml(path.read_bytes())
    except OSError as error:
        raise click.UsageError(f"--config: {path}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--config: {path}: {error}") from None
    known = {name: param for param in command.params if isinstance(param, Option) for name in _names(param)}
    found = {}
    for place, (name, value) in enumerate(values.items(), 1):
        param = known.get(name.replace("-", "_"))
        if param is None or param.is_eager:
            near = get_close_matches(name.replace("-", "_"), known, n=1)
            meant = f": did you mean {near[0].replace('_', '-')}?" if near else ""
            # A key that was pasted in the wrong place may stand there.
            raise click.UsageError(f"--config: {path}: the name of its entry {place} is no option{meant}")
        # The environment comes first, as it does for click's own variables.
        if param.name is not None and (param.variable is None or param.variable not in os.environ):
            found[param.name] = _as_given(param, value, f"--config: {path}: {name}")
    return found


def _as_given(param: Option, value: Any, where: str) -> Any:
    """As on the command line. Raises click.UsageError."""
    if param.is_bool_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where}: write true or false")
        return value
    values = value if isinstance(value, list) and param.multiple else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
        kinds = "a text or a number, or a list of them" if param.multiple else "a text or a number"
        raise click.UsageError(f"{where}: write {kinds}")
    texts = list(map(str, values))
    return texts if param.multiple else texts[0]


def _names(param: Option) -> list[str]:
    """The names of an option as they are in a variable or a file."""
    return [each[2:].replace("-", "_") for each in param.opts if each.startswith("--")]
