"""What the commands that measure have in common: options of a server and of a retriever, and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ragorder.cli.options import ParamType

__all__ = ["Seeds", "embedding_model", "events_options", "only_server_options", "server_options"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

embedding_model = click.option(
    "--embedding-model", metavar="NAME", help="sentence-transformers model of the dense retriever."
)


class Seeds(ParamType[list[int]]):
    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [int(seed) for seed in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: give integers with commas between them, such as 0,1,2", param, ctx)


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--served-model and --api-key, of a command with other engines than a server."""
    return _server_options("openai: the")(command)


def only_server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--served-model and --api-key, of a command that measures nothing but servers."""
    return _server_options("The")(command)


def _server_options(the: str) -> Decorator:
    return _together(
        click.option("--served-model", metavar="NAME", help=f"{the} model's id there. [default: the first one listed]"),
        click.option(
            "--api-key",
            envvar="OPENAI_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help=f"{the} server's key, if it has one.",
        ),
    )


def events_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--events-endpoint, --replay-endpoint and --events-topic."""
    return _together(
        click.option("--events-endpoint", metavar="ZMQ", help="openai: where the server publishes KV events."),
        click.option("--replay-endpoint", metavar="ZMQ", help="openai: where they can be asked for again."),
        click.option("--events-topic", metavar="NAME", help="openai: their topic. [default: any]"),
    )(command)


def _together(*options: Decorator) -> Decorator:
    """They are shown in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
