"""What `ragorder serve` takes, how long it waits, and whom it answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

__all__ = ["check_keys", "limit_options"]

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = ("api_key", "upstream_api_key")
_POSITIVE = click.FloatRange(min=0, min_open=True)


def _number(name: str, default: float, metavar: str, text: str) -> Callable[[F], F]:
    return click.option(name, type=_POSITIVE, default=default, show_default=True, metavar=metavar, help=text)


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--allow-host",
        metavar="NAME",
        multiple=True,
        help="Without --api-key: another name by which the proxy may be called, and whose web pages may call it; given "
        "more than once if need be. [default: on a loopback --host this machine's names only, otherwise all]",
    ),
    _number("--body-limit", 32.0, "MIB", "Longest body of a request, in MiB."),
    _number(
        "--bodies-limit",
        256.0,
        "MIB",
        "Memory for the bodies of all requests together, in MiB; what does not fit is answered with 503.",
    ),
    _number("--connect-timeout", 10.0, "SECONDS", "How long the server may take to accept a connection."),
    _number("--read-timeout", 600.0, "SECONDS", "How long it may take from one byte of an answer to the next."),
    _number(
        "--client-timeout",
        30.0,
        "SECONDS",
        "How long a client may take to send its headers, to send 256 KiB of a body, and to take a piece of the answer.",
    ),
    click.option(
        "--max-connections",
        type=click.IntRange(min=1),
        default=1024,
        show_default=True,
        metavar="N",
        help="Connections of clients at a time; a new one takes the place of one that is idle.",
    ),
    click.option(
        "--grace",
        type=click.IntRange(min=0),
        default=30,
        show_default=True,
        metavar="SECONDS",
        help="How long requests in flight may take to end when the proxy is stopped (SIGTERM, SIGINT).",
    ),
)


def limit_options(command: F) -> F:
    """The options of a command that serves."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_keys(context: click.Context) -> None:
    """Raises click.UsageError for a key that is empty: it would be no key at all. click takes an empty variable for one
    that is not set, but a secret that is missing is passed on as just that."""
    for param in context.command.params:
        if param.name not in _KEYS:
            continue
        name, value = f"--{param.name.replace('_', '-')}", context.params[param.name]
        if context.get_parameter_source(param.name) is not ParameterSource.COMMANDLINE:
            name = str(param.envvar)
            value = os.environ.get(name)
        if value is not None and not value.strip():
            raise click.UsageError(f"{name}: the key is empty: give one, or leave the setting out")
