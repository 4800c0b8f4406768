"""`MainGroup`: the commands of `ragorder`, whose failures to read and write end in one line."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import click

__all__ = ["MainGroup"]


class MainGroup(click.Group):
    """click's group. A disk that is full, or a stream that fails, is an error with a message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            # A reader that has gone is no failure: click ends quietly.
            if error.errno == errno.EPIPE:
                raise
            _drop_what_is_not_written()
            raise click.ClickException(str(error)) from None


def _drop_what_is_not_written() -> None:
    """Python writes out what is left of standard output when it ends, and would fail once more, with a traceback."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
