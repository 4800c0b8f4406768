"""The k best of several parts of an index, as FAISS's own heap would have kept them had it seen all parts in turn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import SearchResult

__all__ = ["TopKMerge"]


class TopKMerge:
    """The k best so far of each query; `add` takes the k best of the next part.

    The heap lets a vector in only if it is better than the worst it holds, and of equals throws out the largest id
    first (for similarities the smallest). So among vectors that tie for the last places the order of the scan decides,
    too, which cannot be told from two parts' results if ties of the later part are among them and do not all fit.
    `uncertain` says for which queries that is so.
    """

    def __init__(self, first: SearchResult, *, similarity: bool) -> None:
        self.distances, self.ids = first
        self._sign = np.float32(-1 if similarity else 1)
        self._id_sign = -1 if similarity else 1
        self._keys = self.distances * self._sign
        self._doubt: NDArray[np.float32] | None = None

    @property
    def uncertain(self) -> NDArray[np.intp]:
        """The queries whose last places are held by vectors that tie with others that may have come first."""
        if self._doubt is None:
            return np.empty(0, np.intp)
        return np.flatnonzero(self._doubt == self._keys[:, -1])

    def add(self, part: SearchResult) -> None:
        """TopKMerge the next part's result, k a query as well; the arrays held so far are left as they are."""
        distances, ids = part
        keys = distances * self._sign
        if not (keys[:, 0] < self._keys[:, -1]).any():
            return
        k = keys.shape[1]
        all_keys = np.concatenate((self._keys, keys), axis=1)
        all_ids = np.concatenate((self.ids, ids), axis=1)
        order = np.argsort(all_keys, axis=1, kind="stable")
        rows = np.arange(len(keys))
        edge = all_keys[rows, order[:, k - 1]]
        beyond = order[:, k]
        cut = (edge == all_keys[rows, beyond]) & (all_ids[rows, beyond] != -1)
        # Had the parts before k vectors as good, none of this part's came in by a tie, and what they hold is in order.
        if cut.any() and (cut := cut & (edge < self._keys[:, -1]) & (keys == edge[:, None]).any(axis=1)).any():
            doubt = np.full(len(keys), np.nan, np.float32) if self._doubt is None else self._doubt
            self._doubt = np.where(cut, edge, doubt)
        order, rows = order[:, :k], rows[:, None]
        new_keys, new_ids = all_keys[rows, order], all_ids[rows, order]
        if (new_keys[:, 1:] == new_keys[:, :-1]).any():
            again = np.lexsort((new_ids * self._id_sign, new_keys), axis=1)
            new_keys, new_ids = new_keys[rows, again], new_ids[rows, again]
        self._keys, self.ids = new_keys, new_ids
        self.distances = new_keys * self._sign

    def replace(self, rows: NDArray[np.intp], found: SearchResult) -> None:
        """Put what was found for these queries in the place of what is held."""
        self.distances, self.ids = self.distances.copy(), self.ids.copy()
        self.distances[rows], self.ids[rows] = found
        self._keys = self.distances * self._sign
        self._doubt = None
