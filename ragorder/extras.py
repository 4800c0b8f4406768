"""Optional packages, by the extras of ragorder that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["install_hint", "needs"]


def install_hint(extra: str) -> str:
    """Return what to do for an extra, or for several with commas between them. ragorder is on no package index."""
    return f"in a clone of ragorder, pip install '.[{extra}]'"


@contextmanager
def needs(extra: str, user: str) -> Iterator[None]:
    """A block of imports for `user`. An ImportError names the extra to install.

    with needs("eval", "a picture"):
        import matplotlib
    """
    try:
        yield
    except ImportError as error:
        reason = f"{user} needs {error.name}" if isinstance(error, ModuleNotFoundError) else f"{user}: {error}"
        raise ImportError(f"{reason}: {install_hint(extra)}", name=error.name) from error
