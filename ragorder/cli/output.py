"""Input and output of the commands: files, figures, repeated figures."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from ragorder.cli.options import option
from ragorder.cli.values import Duration

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Figures", "StreamFile", "log_shown", "show_figures", "watch_options"]


class StreamFile(click.File):
    """click's file, which refuses a standard stream that was closed before the program started."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> IO[Any]:
        name, stream = ("input", sys.stdin) if "r" in self.mode else ("output", sys.stdout)
        if value == "-" and stream is None:
            self.fail(f"standard {name} is closed: name a file", param, ctx)
        return super().convert(value, param, ctx)


class Figures(Protocol):
    """A reading that can be shown."""

    def show(self) -> RenderableType: ...

    def as_json(self) -> Any: ...


@contextmanager
def log_shown(name: str, heading: str) -> Iterator[None]:
    """What a logger reports in this block, on standard error."""
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
    """--watch (`interval_s`) and --json (`as_json`)."""
    watch = option(
        "--watch",
        "interval_s",
        type=Duration(0.1),
        metavar="TIME",
        help="Repeat at this interval, until interrupted.",
    )
    as_json = option(
        "--json", "as_json", is_flag=True, help="Write the figures as JSON; with --watch a line each time."
    )
    return watch(as_json(command))


def show_figures(read: Callable[[], Figures], interval_s: float | None, as_json: bool) -> None:
    """Show them once, or every `interval_s` seconds until interrupted. Raises as `read` does."""
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
