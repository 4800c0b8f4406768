"""Commands run in the tests' own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.testing import CliRunner, Result


def run_command(
    command: click.Command, *arguments: Any, input: str | bytes | None = None, env: Mapping[str, str] | None = None
) -> Result:
    """The result of a command, which only its own errors may end."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], input=input, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert "Traceback" not in done.output
    return done
