"""The commands of ragorder, and their runs in the tests' own process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from ragorder.cli.main import main

MISSING = (
    *("torch", "vllm", "faiss", "transformers", "sentence_transformers", "bm25s", "langchain", "scipy", "matplotlib"),
    "numpy",
)
"""Packages of extras, which most commands do without."""


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


invoke = partial(run_command, main)


def refusal(*arguments: Any, input: str | bytes | None = None) -> str:
    """What is said of a command that fails."""
    done = invoke(*arguments, input=input)
    assert done.exit_code != 0, done.output
    return done.stderr


def lines(*values: Any) -> str:
    """As JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    path.write_text(lines(*values), "utf-8")
    return path
