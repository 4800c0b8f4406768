"""Documents inside the text of a tool's result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["DocumentsInside"]

_WORD = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class DocumentsInside:
    """Numbers of documents in the `order` of a text, and the text's `pieces` around them."""

    order: tuple[int, ...]
    pieces: tuple[str, ...]

    @classmethod
    def find(cls, text: str, documents: Sequence[str]) -> Self | None:
        """Return the documents' positions, or None unless each one is there whole, without overlaps."""
        taken: list[tuple[int, int, int]] = []
        # A short one may be a part of a longer one.
        for number in sorted(range(len(documents)), key=lambda number: -len(documents[number])):
            wanted = documents[number]
            place = text.find(wanted) if wanted.strip() else -1
            while place >= 0:
                other_end = next((end for start, end, _ in taken if start < place + len(wanted) and place < end), None)
                if other_end is None:
                    break
                place = text.find(wanted, other_end)
            if place < 0:
                return None
            taken.append((place, place + len(wanted), number))
        taken.sort()
        starts, ends = [0, *(end for _, end, _ in taken)], [*(start for start, _, _ in taken), len(text)]
        pieces = tuple(text[start:end] for start, end in zip(starts, ends, strict=True))
        return cls(tuple(number for _, _, number in taken), pieces)

    @property
    def has_own_words(self) -> bool:
        return any(map(_WORD.search, self.pieces))

    def fill(self, shown: Sequence[str]) -> str:
        """Return the text with `shown` instead of the documents and the white space after each."""
        rest = (each + (piece if piece.strip() else "") for each, piece in zip(shown, self.pieces[1:], strict=True))
        return self.pieces[0] + "".join(rest)
