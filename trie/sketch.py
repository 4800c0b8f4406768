"""Decayed counts in bounded memory."""

from __future__ import annotations

from array import array
from struct import Struct

__all__ = ["DIGEST_BYTES", "DecayedSketch"]

DIGEST_BYTES = 16

_ROWS = Struct("<4I")
_RESCALE = 1e200


class DecayedSketch:
    """How often each digest was counted, an occurrence `half_life` steps ago half as much.

        counts = DecayedSketch()
        counts.step()
        counts.add(digest)

    A count-min sketch with conservative updates (Estan and Varghese 2002): a count is never too small, and too large
    only if the digest shares a cell with a more frequent one in each of four rows of `width` (a power of two). Digests
    have 16 bytes. Threads may lose each other's counts.
    """

    def __init__(self, half_life: int = 4096, width: int = 1 << 14) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"width must be a power of two, got {width}")
        self._growth = 2.0 ** (1 / half_life)
        # Instead of decaying every count, each new step weighs more than the one before.
        self._weight = 1.0
        self._steps = 0.0
        self._width = width
        self._cells = array("d", bytes(8 * 4 * width))

    @property
    def steps(self) -> float:
        """The number of steps, decayed as the counts are."""
        return self._steps

    def step(self) -> None:
        self._weight *= self._growth
        self._steps = 1.0 + self._steps / self._growth
        if self._weight > _RESCALE:
            self._cells = array("d", (cell / self._weight for cell in self._cells))
            self._weight = 1.0

    def add(self, digest: bytes) -> float:
        """Count one occurrence; the count with it."""
        cells, width, weight = self._cells, self._width, self._weight
        places = [row * width + (place & width - 1) for row, place in enumerate(_ROWS.unpack(digest))]
        count: float = min([cells[place] for place in places]) + weight
        for place in places:
            if cells[place] < count:
                cells[place] = count
        return count / weight
