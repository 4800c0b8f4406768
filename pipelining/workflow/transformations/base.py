"""Interface of a transformation."""

from __future__ import annotations

from typing import Protocol

from ragorder.pipelining.workflow.facts import Facts
from ragorder.pipelining.workflow.wavefront import Piece, Wavefront

__all__ = ["Transformation"]


class Transformation(Protocol):
    """A change of the wavefront, applied in each scheduling cycle where it saves time.

    It decides about the pieces of `wavefront.new` before they start, or adds pieces ahead of need because of others'
    `wavefront.progressed`. Both methods are quick: they run on the event loop. An error leaves the pieces as they are.
    """

    name: str

    def apply(self, wavefront: Wavefront, facts: Facts, /) -> None: ...

    def gain_s(self, piece: Piece, facts: Facts, /) -> float:
        """Seconds saved on average by applying this to the piece; it is left alone unless they are positive. Where
        nothing is known yet, positive."""
