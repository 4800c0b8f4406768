"""The commands of ragorder, and their runs in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.testing import CliRunner, Result

from ragorder.cli.main import main


def every_command(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Each command with its path, groups before their members."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (member := command.get_command(context, name)) is not None:
                yield from every_command(member, (*path, name))


def run_command(
    command: click.Command, *arguments: Any, input: str | bytes | None = None, env: Mapping[str, str] | None = None
) -> Result:
    """The result of a command, which only its own errors may end."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], input=input, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert "Traceback" not in done.output
    return done
