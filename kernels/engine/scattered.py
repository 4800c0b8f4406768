"""Prefill of a fused request: positions to compute between KV that was taken over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Positions", "ScatteredPrefill", "Spans"]

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Spans = Sequence[tuple[int, int]]
"""Begins and ends, ascending."""


class ScatteredPrefill:
    """Of `tokens` tokens the first `computed` have exact KV, and those in `taken` have KV from elsewhere.

    First the documents in front of the first taken one are computed, exactly, or with `documents_first` all that have
    no KV; then what was chosen, and the rest.
    """

    def __init__(
        self, tokens: int, computed: int, taken: Spans, path_tokens: int, *, documents_first: bool = False
    ) -> None:
        missing = np.ones(tokens, dtype=np.bool_)
        missing[:computed] = False
        for begin, end in taken:
            missing[begin:end] = False
        self.exact_tokens = taken[0][0]
        """Tokens in front of the first approximate one."""
        self._tokens = tokens
        places = np.flatnonzero(missing)
        first = places < (path_tokens if documents_first else self.exact_tokens)
        self._todo, self._rest = places[first], places[~first]
        self._critical: Positions | None = None

    def __len__(self) -> int:
        """Positions to compute, without those behind a choice that is not made yet."""
        return len(self._todo)

    def choose(self, anew: Positions, *, as_if_last: bool = False) -> None:
        """Compute these as well, and what is left."""
        later = np.union1d(anew, self._rest)
        if as_if_last and len(anew):
            self._critical = anew
        elif np.array_equal(later, np.arange(self.exact_tokens, self._tokens)):
            # Full attention.
            self.exact_tokens = self._tokens
        self._todo = np.concatenate((self._todo, later))

    def choose_all(self, written: Positions) -> None:
        """Full attention. `written`: positions that a choice under way has overwritten."""
        first = self._todo[self._todo < self.exact_tokens]
        begin = int(first[0]) if len(first) else self.exact_tokens
        self._todo = np.union1d(written, np.arange(begin, self._tokens))
        if self._todo[0] >= begin:
            self.exact_tokens = self._tokens

    def take(self, room: int) -> int:
        """Positions of a step with so much room. Critical ones share a step, however large: they see each other."""
        tokens = min(room, len(self._todo))
        if self._critical is None:
            return tokens
        places = np.flatnonzero(np.isin(self._todo, self._critical))
        if not len(places) or tokens <= places[0] or tokens > places[-1]:
            return tokens
        return int(places[0]) or int(places[-1]) + 1

    def positions(self, tokens: int) -> Positions:
        """The next ones to compute."""
        return self._todo[:tokens]

    def critical(self, positions: Positions) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Which of them are computed as though their document came last; None: none."""
        if self._critical is None:
            return None
        chosen = np.isin(positions, self._critical)
        return chosen if chosen.any() else None

    def exact_after(self, tokens: int) -> int:
        """Tokens with exact KV once the next `tokens` are computed."""
        return min(self.exact_tokens, int(self._todo[:tokens].max()) + 1)

    def advance(self, tokens: int) -> None:
        self._todo = self._todo[tokens:]
