"""Searches of the next piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from ragorder.pipelining.search.budget import PieceLimit
from ragorder.pipelining.search.running import RunningSearch

__all__ = ["PieceOrder", "fill"]

PieceOrder = Literal["oldest", "shortest"]

# A search that has waited for ten seconds goes before one that is shorter by one.
_AGEING = 0.1


def fill(
    searches: Sequence[RunningSearch],
    limit: PieceLimit,
    *,
    cores: int,
    code_s: float,
    order: PieceOrder,
    now_s: float,
) -> list[tuple[RunningSearch, int]]:
    """Searches, oldest first as given, until the cores have work for the piece's time; with the cluster before which
    each one's part ends. Equal shares of a core would only delay them all. Those not due take what the others leave."""
    left = limit.seconds * cores / code_s
    piece: list[tuple[RunningSearch, int]] = []
    if order == "shortest":
        searches = sorted(searches, key=lambda each: each.left_codes * code_s - _AGEING * (now_s - each.submitted_s))
    due = (search for search in searches if search.handle.due)
    ahead = (search for search in searches if not search.handle.due)
    for search in chain(due, ahead):
        if piece and limit.whole and left < search.left_codes / 2:
            break
        stop = search.end_of_piece(left, whole=limit.whole)
        piece.append((search, stop))
        left -= search.codes[stop] - search.codes[search.done]
        if left <= 0:
            break
    return piece
