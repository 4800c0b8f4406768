"""`Stream`: a file to read or write, or - for a standard stream."""

from __future__ import annotations

import sys
from typing import IO, Any

import click

__all__ = ["Stream"]


class Stream(click.File):
    """click's file. A standard stream that was closed before the program started is refused like a file that cannot be
    opened; click fails on it with a traceback."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> IO[Any]:
        name, stream = ("input", sys.stdin) if "r" in self.mode else ("output", sys.stdout)
        if value == "-" and stream is None:
            self.fail(f"standard {name} is closed: name a file", param, ctx)
        return super().convert(value, param, ctx)
