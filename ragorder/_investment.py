"""Documents recomputed exactly to extend the shared prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder.settings import Settings
from ragorder.trie.expected_uses import HORIZON
from ragorder.trie.tail import Tail
from ragorder.trie.tree import Node, RequestedDocuments

__all__ = ["Invested", "Investment"]

# Share of recomputed tokens that may be spent before later requests save them.
_CREDIT = 0.01
# Forecast and observed uses at the start, and the share by which each request decays later ones.
_PRIOR = 50.0
_FORGOTTEN = 0.001


class Invested(NamedTuple):
    """The place of a document that is computed although it has a copy, and its expected uses."""

    place: int
    uses: float


class _Promise(NamedTuple):
    tokens: int
    uses_per_request: float


class Investment:
    """Choice of documents to compute exactly after the exact prefix, although all have copies.

    Such a request computes all tokens of the document instead of the share `recompute`. Each later request with this
    prefix, as `tail` forecasts them, computes no token instead of that share. Forecasts are scaled by the rate at which
    earlier ones came true: paths are evicted, and a request uses only one of two fitting paths. At most 1 % of the
    recomputed tokens is spent in advance: in the worst case, 1 % more tokens are computed.
    """

    def __init__(self, settings: Settings, tail: Tail) -> None:
        # With copies "served", documents without a copy extend the prefix already.
        self._invests = settings.invest and settings.copies == "all"
        self._recompute = settings.recompute
        self._min_gain = settings.min_gain
        self._tail = tail
        self._tokens_left = 0.0
        self._promised = self._kept = _PRIOR
        # Those of the last `HORIZON` requests; `_due` is the sum of their uses per request.
        self._promises: dict[Node, _Promise] = {}
        self._made: deque[tuple[int, Node, _Promise]] = deque()
        self._due = 0.0
        self._requests = 0

    def copy(self, tail: Tail) -> Self:
        """Return a copy with the same budget for another tree."""
        copy = shallow_copy(self)
        copy._tail = tail
        copy._promises, copy._made, copy._due = {}, deque(), 0.0
        return copy

    def choose(
        self, request: RequestedDocuments, tokens: Sequence[int], prefix: Sequence[int], ranks: Sequence[int]
    ) -> list[int]:
        """Return the documents of `ranks` to compute after `prefix`, next first. `tokens`: lengths by rank.

        The next document is the one that saves most tokens, if they pay for the places that it moves (`min_gain`).
        """
        placed, left, spent = list(prefix), list(ranks), 0.0
        while left:
            best, most, moved = None, 0.0, 0.0
            for rank, uses in zip(left, self._uses(request, placed, left), strict=False):
                gain = self._gain(tokens[rank], uses) - moved
                if gain > most:
                    best, most = rank, gain
                moved += self._min_gain
            if best is None:
                break
            spent += self.cost(tokens[best])
            if spent > self._tokens_left:
                break
            left.remove(best)
            placed.append(best)
        return placed[len(prefix) :]

    def uses(
        self, request: RequestedDocuments, tokens: Sequence[int], placed: Sequence[int], rank: int, spent: float
    ) -> float | None:
        """Return the expected uses of a document after those `placed`, or None if it does not pay or exceeds the budget
        after `spent` tokens."""
        for uses in self._uses(request, placed, [rank]):
            if self._gain(tokens[rank], uses) > 0 and spent + self.cost(tokens[rank]) <= self._tokens_left:
                return uses
        return None

    def cost(self, tokens: int) -> float:
        """Return the tokens of a document that must be computed now in addition to those for its copy."""
        return (1 - self._recompute) * tokens

    def begin(self, path: Sequence[Node], cached_documents: int, invested: Sequence[Invested], taken_over: int) -> None:
        """Start a request whose documents' nodes are in `path`, from the root. It reuses `reused_tokens` of copies."""
        if not self._invests:
            return
        self._requests += 1
        while self._made and self._requests - self._made[0][0] > HORIZON:
            _, node, promise = self._made.popleft()
            self._end(node, promise)
        self._promised += self._due - _FORGOTTEN * (self._promised - _PRIOR)
        self._kept -= _FORGOTTEN * (self._kept - _PRIOR)
        self._tokens_left += _CREDIT * self._recompute * taken_over
        for node in path[1 : 1 + cached_documents]:
            if (known := self._promises.get(node)) is not None:
                self._kept += 1
                self._tokens_left += self._recompute * known.tokens
        for place, uses in invested:
            node = path[1 + place]
            promise = self._promises[node] = _Promise(node.end - path[place].end, uses / HORIZON)
            self._made.append((self._requests, node, promise))
            self._due += promise.uses_per_request
            self._tokens_left -= self.cost(promise.tokens)

    def cancel(self, path: Sequence[Node], invested: Iterable[Invested]) -> None:
        """Undo the investments of a request that was never served."""
        for place, _ in invested:
            node = path[1 + place]
            if (promise := self._promises.get(node)) is not None:
                self._end(node, promise)
                self._tokens_left += self.cost(promise.tokens)

    def _uses(self, request: RequestedDocuments, placed: Sequence[int], ranks: Sequence[int]) -> Sequence[float]:
        return self._tail.coming_uses(request, placed, ranks) if self._invests else ()

    def _gain(self, tokens: int, uses: float) -> float:
        """Return the tokens that are saved in total."""
        return min(1.0, self._kept / self._promised) * uses * self._recompute * tokens - self.cost(tokens)

    def _end(self, node: Node, promise: _Promise) -> None:
        if self._promises.get(node) is promise:
            del self._promises[node]
            self._due -= promise.uses_per_request
