"""Extras of ragorder that install optional packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def install_hint(extra: str) -> str:
    """Return how to install an extra, or several separated by commas."""
    return f"in a clone of ragorder, pip install '.[{extra}]'"


@contextmanager
def needs(extra: str, user: str) -> Iterator[None]:
    """Wrap imports for `user`. An ImportError names the extra to install."""
    try:
        yield
    except ImportError as error:
        reason = f"{user} needs {error.name}" if isinstance(error, ModuleNotFoundError) else f"{user}: {error}"
        raise ImportError(f"{reason}: {install_hint(extra)}", name=error.name) from error


@contextmanager
def spared(*packages: str) -> Iterator[None]:
    """Import as if these packages were not installed, so that other packages do without them."""
    absent = [name for name in packages if name not in sys.modules]
    # None is Python's entry for a module that cannot be imported.
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)
