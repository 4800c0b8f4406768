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

    def __len__(self) -> int:
        """Positions to compute, without those behind a choice that is not made yet."""
        return len(self._todo)

    def choose(self, anew: Positions) -> None:
        """Compute these as well, and what is left."""
        later = np.union1d(anew, self._rest)
        if np.array_equal(later, np.arange(self.exact_tokens, self._tokens)):
            # Full attention.
            self.exact_tokens = self._tokens
        self._todo = np.concatenate((self._todo, later))

    def choose_all(self) -> None:
        """Full attention, whatever a choice under way has overwritten."""
        first = self._todo[self._todo < self.exact_tokens]
        begin = int(first[0]) if len(first) else self.exact_tokens
        self._todo = np.arange(begin, self._tokens)
        self.exact_tokens = self._tokens

    def positions(self, tokens: int) -> Positions:
        """The next ones to compute."""
        return self._todo[:tokens]

    def exact_after(self, tokens: int) -> int:
        """Tokens with exact KV once the next `tokens` are computed."""
        return min(self.exact_tokens, int(self._todo[:tokens].max()) + 1)

    def advance(self, tokens: int) -> None:
        self._todo = self._todo[tokens:]
