"""Selections of critical tokens: which of the tokens taken over are recomputed. Importing it needs no torch."""

from ragorder.kernels.fusion.selection.base import Needs, Selection, SelectionFacts, selections

__all__ = [
    "ENGINE_SELECTIONS",
    "SELECTIONS",
    "Needs",
    "Selection",
    "SelectionFacts",
    "check_coverage",
    "check_engine_selection",
    "make_selection",
    "selections",
]

selections.load(__name__, __path__)

SELECTIONS = tuple(selections.names)

ENGINE_SELECTIONS = tuple(name for name in SELECTIONS if selections[name].needs != "copies")
"""Those whose facts the embedded engine measures: it keeps nothing of how copies were made."""


def check_engine_selection(name: str) -> str:
    """Raises ValueError naming the choices."""
    if selections.check(name) not in ENGINE_SELECTIONS:
        choices = ", ".join(map(repr, ENGINE_SELECTIONS))
        raise ValueError(f"selection {name!r} goes by what the engine does not measure: choose one of {choices}")
    return name


def check_coverage(select: str, coverage: float) -> None:
    """Raises ValueError for a selection that measures nothing of which there is a share."""
    if coverage < 1 and selections[select].needs == "nothing":
        choices = " or ".join(repr(name) for name in ENGINE_SELECTIONS if selections[name].needs != "nothing")
        raise ValueError(
            f"coverage is of what is measured, and selection {select!r} measures nothing: choose {choices}"
        )


def make_selection(name: str) -> Selection:
    """Raises ValueError naming the choices."""
    return selections[selections.check(name)]()
