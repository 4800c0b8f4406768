"""Extras of ragorder that install optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def install_hint(extra: str) -> str:
    """Return how to install an extra, or several separated by commas. ragorder is not on a package index."""
    return f"in a clone of ragorder, pip install '.[{extra}]'"


@contextmanager
def needs(extra: str, user: str) -> Iterator[None]:
    """Wrap imports for `user`. An ImportError names the extra to install."""
    try:
        yield
    except ImportError as error:
        reason = f"{user} needs {error.name}" if isinstance(error, ModuleNotFoundError) else f"{user}: {error}"
        raise ImportError(f"{reason}: {install_hint(extra)}", name=error.name) from error
