"""Selections of critical tokens: which of the tokens taken over are recomputed. Importing it needs no torch."""

from ragorder.kernels.fusion.selection.base import Needs, Selection, SelectionFacts, selections

__all__ = [
    "SELECTIONS",
    "Needs",
    "Selection",
    "SelectionFacts",
    "check_coverage",
    "make_selection",
    "selections",
]

selections.load(__name__, __path__)

SELECTIONS = tuple(selections.names)


def check_coverage(select: str, coverage: float) -> None:
    """Raises ValueError for a selection that measures nothing of which there is a share."""
    if coverage < 1 and selections[select].needs == "nothing":
        choices = " or ".join(repr(name) for name in SELECTIONS if selections[name].needs != "nothing")
        raise ValueError(
            f"coverage is of what is measured, and selection {select!r} measures nothing: choose {choices}"
        )


def make_selection(name: str) -> Selection:
    """Raises ValueError naming the choices."""
    return selections[selections.check(name)]()
