"""Figures shown once, or again and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import sleep
from typing import Any, Protocol

import click
from rich.console import Console, RenderableType
from rich.live import Live

__all__ = ["Figures", "show_figures", "watch_options"]


class Figures(Protocol):
    """What was read at one moment."""

    def show(self) -> RenderableType: ...

    def as_json(self) -> Any: ...


def watch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--watch (`interval_s`) and --json (`as_json`)."""
    watch = click.option(
        "--watch",
        "interval_s",
        type=click.FloatRange(min=0.1),
        metavar="SECONDS",
        help="Ask again every so many seconds, until interrupted.",
    )
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="Write the figures as JSON; with --watch a line each time."
    )
    return watch(as_json(command))


def show_figures(read: Callable[[], Figures], interval_s: float | None, as_json: bool) -> None:
    """Once, or every `interval_s` seconds until somebody interrupts. Raises as `read` does."""
    try:
        figures = read()
        if interval_s is None:
            if as_json:
                click.echo(json.dumps(figures.as_json(), indent=1))
            else:
                Console().print(figures.show())
            return
        with Live(figures.show(), auto_refresh=False, console=Console(quiet=as_json)) as live:
            while True:
                if as_json:
                    click.echo(json.dumps(figures.as_json()))
                live.update(figures.show(), refresh=True)
                sleep(interval_s)
                figures = read()
    except KeyboardInterrupt:
        pass
