"""Messages about unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}: {choices(name, known)}"


def choices(name: str, known: Iterable[str]) -> str:
    """The nearest names first."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}choose from {', '.join(known)}"
