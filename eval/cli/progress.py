"""Progress bar of long work, or lines without a terminal, on standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_S = 2.0
"""Time before the first line, for commands that are often shorter."""

Announce = Callable[[str, int], Callable[[], None]]


@contextmanager
def progress_bar(*, quiet_s: float = 0.0, every_s: float = 10.0) -> Iterator[Announce]:
    """Yield a function that announces work (description, steps) and returns a callback for each finished step.

    Without a terminal, a line is printed when work begins, every `every_s` and at the end; nothing for work shorter
    than `quiet_s`.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        with _lines(quiet_s, every_s) as announce:
            yield announce
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:

        def announce(description: str, steps: int) -> Callable[[], None]:
            task = bar.add_task(description, total=steps)
            return lambda: bar.advance(task)

        yield announce


class _Work:
    def __init__(self, description: str, steps: int) -> None:
        self._description = description
        self._steps = steps
        self._done = 0
        self._began_s = time.monotonic()

    def advance(self) -> None:
        self._done += 1

    def print(self) -> None:
        count = f": {self._done:,} of {self._steps:,}" if self._steps > 1 else ""
        click.echo(f"{self._description}{count}, {time.monotonic() - self._began_s:.0f} s", err=True)


@contextmanager
def _lines(quiet_s: float, every_s: float) -> Iterator[Announce]:
    begun: list[_Work] = []
    loud, ended = threading.Event(), threading.Event()
    if not quiet_s:
        loud.set()

    def announce(description: str, steps: int) -> Callable[[], None]:
        begun.append(_Work(description, steps))
        if loud.is_set():
            begun[-1].print()
        if len(begun) == 1:
            thread.start()
        return begun[-1].advance

    def repeat() -> None:
        wait_s = quiet_s or every_s
        while not ended.wait(wait_s):
            loud.set()
            begun[-1].print()
            wait_s = every_s

    # A thread, since one step may take longer than the time between two lines.
    thread = threading.Thread(target=repeat, name="ragorder-progress", daemon=True)
    try:
        yield announce
    finally:
        ended.set()
        if begun:
            thread.join()
            if loud.is_set():
                begun[-1].print()
