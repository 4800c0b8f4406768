"""Decayed counts in bounded memory."""

from __future__ import annotations

from array import array
from struct import Struct

__all__ = ["DIGEST_BYTES", "DecayedSketch"]

DIGEST_BYTES = 16

_ROWS = Struct("<4I")
_RESCALE = 1e200


class DecayedSketch:
    """Counts of digests; an occurrence `half_life` steps ago counts half.

        counts = DecayedSketch()
        counts.step()
        counts.add(digest)

    A count-min sketch with conservative updates (Estan and Varghese 2002): four rows of `width` cells, a power of two.
    Digests have 16 bytes. Concurrent threads may lose counts.
    """

    def __init__(self, half_life: int = 4096, width: int = 1 << 14) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"width must be a power of two, got {width}")
        self._growth = 2.0 ** (1 / half_life)
        self._steps = 0.0
        self._width = width
        # Instead of decaying every count, each new step weighs more than the one before. Counts and weight are one
        # tuple, so that threads always read a matching pair.
        self._weighted = array("d", bytes(8 * 4 * width)), 1.0

    @property
    def steps(self) -> float:
        return self._steps

    def step(self) -> None:
        cells, weight = self._weighted
        weight *= self._growth
        self._steps = 1.0 + self._steps / self._growth
        if weight > _RESCALE:
            cells, weight = array("d", (cell / weight for cell in cells)), 1.0
        self._weighted = cells, weight

    def add(self, digest: bytes) -> float:
        (cells, weight), width = self._weighted, self._width
        places = [row * width + (place & width - 1) for row, place in enumerate(_ROWS.unpack(digest))]
        count: float = min([cells[place] for place in places]) + weight
        for place in places:
            if cells[place] < count:
                cells[place] = count
        return count / weight
