"""Progress of long work, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yields a function that announces work (description, steps) and returns a callback for each finished step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def announce(description: str, steps: int) -> Callable[[], None]:
            task = bar.add_task(description, total=steps)
            return lambda: bar.advance(task)

        yield announce
