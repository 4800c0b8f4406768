"""Document order for position-independent KV reuse (FusionRAG)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder.settings import Settings
from ragorder.trie.expected_uses import HORIZON
from ragorder.trie.residency import KnowsTiers
from ragorder.trie.search import Rest
from ragorder.trie.tail import RankTail, Tail
from ragorder.trie.tree import Key, KnowledgeTree, Node, RequestedDocuments

# Share of recomputed tokens that may be spent before later requests save them.
_BUDGET = 0.01
# Forecast and observed uses at the start, and the share by which each request decays later ones.
_PRIOR = 50.0
_DECAY = 0.001


class Invested(NamedTuple):
    """Place of a document that is computed although it has a copy, and its expected uses."""

    place: int
    uses: float


class _Expectation(NamedTuple):
    tokens: int
    uses_per_request: float


class Investment:
    """Documents to compute exactly after the exact prefix, although all have copies.

    The request computes all tokens of such a document instead of the share `recompute`; later requests with this
    prefix, forecast by `tail`, compute none. Forecasts are scaled by the rate at which earlier ones came true. At most
    1 % of the recomputed tokens is spent before it is saved.
    """

    def __init__(self, settings: Settings, tail: Tail) -> None:
        # With copies "served", documents without a copy extend the prefix already.
        self._invests = settings.invest and settings.copies == "all"
        self._recompute = settings.recompute
        self._min_gain = settings.min_gain
        self._tail = tail
        self._tokens_left = 0.0
        self._forecast_uses = self._observed_uses = _PRIOR
        # Those of the last `HORIZON` requests; `_due` is the sum of their uses per request.
        self._expectations: dict[Node, _Expectation] = {}
        self._made: deque[tuple[int, Node, _Expectation]] = deque()
        self._due = 0.0
        self._requests = 0

    def copy(self, tail: Tail) -> Self:
        copy = shallow_copy(self)
        copy._tail = tail
        copy._expectations, copy._made, copy._due = {}, deque(), 0.0
        return copy

    def choose(
        self, request: RequestedDocuments, tokens: Sequence[int], prefix: Sequence[int], ranks: Sequence[int]
    ) -> list[int]:
        """Return which of `ranks` to compute after `prefix`, next first. `tokens`: lengths by rank.

        The next one saves most tokens, if they pay for the places that it moves (`min_gain`).
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
        for uses in self._uses(request, placed, [rank]):
            if self._gain(tokens[rank], uses) > 0 and spent + self.cost(tokens[rank]) <= self._tokens_left:
                return uses
        return None

    def cost(self, tokens: int) -> float:
        return (1 - self._recompute) * tokens

    def begin(
        self, path: Sequence[Node], cached_documents: int, invested: Sequence[Invested], reused_tokens: int
    ) -> None:
        if not self._invests:
            return
        self._requests += 1
        while self._made and self._requests - self._made[0][0] > HORIZON:
            _, node, expectation = self._made.popleft()
            self._end(node, expectation)
        self._forecast_uses += self._due - _DECAY * (self._forecast_uses - _PRIOR)
        self._observed_uses -= _DECAY * (self._observed_uses - _PRIOR)
        self._tokens_left += _BUDGET * self._recompute * reused_tokens
        for node in path[1 : 1 + cached_documents]:
            if (known := self._expectations.get(node)) is not None:
                self._observed_uses += 1
                self._tokens_left += self._recompute * known.tokens
        for place, uses in invested:
            node = path[1 + place]
            expectation = self._expectations[node] = _Expectation(node.end - path[place].end, uses / HORIZON)
            self._made.append((self._requests, node, expectation))
            self._due += expectation.uses_per_request
            self._tokens_left -= self.cost(expectation.tokens)

    def cancel(self, path: Sequence[Node], invested: Iterable[Invested]) -> None:
        for place, _ in invested:
            node = path[1 + place]
            if (expectation := self._expectations.get(node)) is not None:
                self._end(node, expectation)
                self._tokens_left += self.cost(expectation.tokens)

    def _uses(self, request: RequestedDocuments, placed: Sequence[int], ranks: Sequence[int]) -> Sequence[float]:
        return self._tail.coming_uses(request, placed, ranks) if self._invests else ()

    def _gain(self, tokens: int, uses: float) -> float:
        return min(1.0, self._observed_uses / self._forecast_uses) * uses * self._recompute * tokens - self.cost(tokens)

    def _end(self, node: Node, expectation: _Expectation) -> None:
        if self._expectations.get(node) is expectation:
            del self._expectations[node]
            self._due -= expectation.uses_per_request


class FusedPlaces(NamedTuple):
    """Places of documents: the first `exact` are cached or computed, `invested` of them despite a copy; others may be
    `reused` copies.
    """

    exact: int
    invested: list[Invested]
    reused: list[int]

    @property
    def exact_documents(self) -> int:
        return self.invested[-1].place + 1 if self.invested else 0


class FusedReuse:
    """A scope's documents that have KV outside the cached prefix.

    Only documents computed directly after the cached prefix extend it: first those for which an `Investment` pays, then
    those without KV. Reused copies follow in retrieval order.
    """

    def __init__(self, settings: Settings, tree: KnowledgeTree, tail: Tail | None = None) -> None:
        self._tree = tree
        self._recompute = settings.recompute
        self._all_copied = settings.copies == "all"
        self.investment = Investment(settings, RankTail() if tail is None else tail)

    def copy(self, tree: KnowledgeTree, tail: Tail) -> Self:
        copy = shallow_copy(self)
        copy._tree = tree
        copy.investment = self.investment.copy(tail)
        return copy

    def has_copy(self, key: Key) -> bool:
        return self._all_copied or key in (self._tree.nodes_of or ())

    def split(
        self, request: RequestedDocuments, tokens: Sequence[int], prefix: Sequence[int], ranks: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Split `ranks` into copied documents to compute (next first), new ones, and reused ones."""
        copied = [rank for rank in ranks if self.has_copy(request.keys[rank])]
        invested = self.investment.choose(request, tokens, prefix, copied)
        known = set(copied)
        new = [rank for rank in ranks if rank not in known]
        return invested, new, [rank for rank in copied if rank not in invested]

    def places(self, request: RequestedDocuments, tokens: Sequence[int], permutation: Sequence[int]) -> FusedPlaces:
        keys = request.keys
        node: Node | None = self._tree.root
        invested: list[Invested] = []
        spent = 0.0
        for place, rank in enumerate(permutation):
            child = (node.children or {}).get(keys[rank]) if node is not None else None
            if child is None and self.has_copy(keys[rank]):
                uses = self.investment.uses(request, tokens, permutation[:place], rank, spent)
                if uses is None:
                    others = range(place, len(permutation))
                    return FusedPlaces(
                        place, invested, [other for other in others if self.has_copy(keys[permutation[other]])]
                    )
                invested.append(Invested(place, uses))
                spent += self.investment.cost(tokens[rank])
            node = child
        return FusedPlaces(len(permutation), invested, [])

    def rest(self, keys: Sequence[Key], tokens: Sequence[int], places: KnowsTiers | None) -> Rest:
        start, copied, loads = self._tree.root.end, 0, {}
        for key, length in zip(keys, tokens, strict=True):
            if self.has_copy(key):
                copied += length
                if places is not None and (nodes := (self._tree.nodes_of or {}).get(key)):
                    host, disk = min((places.loads(node) for node in nodes), key=lambda found: found[::-1])
                    loads[key] = host * self._tree.block_size, disk * self._tree.block_size
        computed = sum(tokens) - copied
        # All documents on a cached path have copies.
        return Rest(lambda end: computed + self._recompute * (copied - (end - start)), loads)
