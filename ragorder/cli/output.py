"""Output of the commands: figures, once or repeated, and log lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol

import click

from ragorder.cli.options import option
from ragorder.cli.values import Duration

if TYPE_CHECKING:
    from rich.console import RenderableType


class Figures(Protocol):
    """Figures that were read once."""

    def show(self) -> RenderableType: ...

    def as_json(self) -> Any: ...


@contextmanager
def log_shown(name: str, heading: str) -> Iterator[None]:
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{heading}: %(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def watch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    watch = option(
        "--watch", "interval_s", type=Duration(0.1), metavar="TIME", help="Repeat at this interval, until interrupted."
    )
    as_json = option(
        "--json", "as_json", is_flag=True, help="Write the figures as JSON; with --watch a line each time."
    )
    return watch(as_json(command))


def show_figures(read: Callable[[], Figures], interval_s: float | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

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
