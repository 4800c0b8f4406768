"""Selections of critical tokens: which of the tokens taken over are recomputed. Importing it needs no torch."""

from ragorder.kernels.fusion.selection.base import Needs, Selection, SelectionFacts, selections

__all__ = [
    "SELECTIONS",
    "Needs",
    "Selection",
    "SelectionFacts",
    "make_selection",
    "selections",
]

selections.load(__name__, __path__)

SELECTIONS = tuple(selections.names)


def make_selection(name: str) -> Selection:
    """Raises ValueError naming the choices."""
    return selections[selections.check(name)]()
