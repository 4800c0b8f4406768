"""Documents that an engine takes over from wherever it has computed them (FusionRAG), as far as their order goes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import NamedTuple, Self

from ragorder._investment import Invested, Investment
from ragorder.settings import Settings
from ragorder.trie.residency import Places
from ragorder.trie.search import Rest
from ragorder.trie.tail import RankTail, Tail
from ragorder.trie.tree import Key, KnowledgeTree, Node, RequestedDocuments

__all__ = ["FusedPlaces", "FusedReuse"]


class FusedPlaces(NamedTuple):
    """`exact`: leading documents that are exact, cached or computed; `invested`: those computed although they could be
    taken over; `reused`: places."""

    exact: int
    invested: list[Invested]
    reused: list[int]

    @property
    def exact_documents(self) -> int:
        """Leading documents that the engine must not take over."""
        return self.invested[-1].place + 1 if self.invested else 0


class FusedReuse:
    """A scope's documents with KV off the cached prefix.

    Only what is computed directly behind the cached prefix is exact, and extends it for later requests. So documents
    without KV come there, behind those for which an `Investment` pays; the others are taken over behind them, as
    ranked: their order costs nothing.
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
        """Of the documents `ranks` behind `prefix`: those to compute although they have a copy, next first; those
        without one; those taken over."""
        copied = [rank for rank in ranks if self.has_copy(request.keys[rank])]
        invested = self.investment.choose(request, tokens, prefix, copied)
        known = set(copied)
        new = [rank for rank in ranks if rank not in known]
        return invested, new, [rank for rank in copied if rank not in invested]

    def places(self, request: RequestedDocuments, tokens: Sequence[int], permutation: Sequence[int]) -> FusedPlaces:
        """Of the documents in this order, whatever has decided it."""
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

    def rest(self, keys: Sequence[Key], tokens: Sequence[int], places: Places | None) -> Rest:
        """Of the documents taken over a share is computed, and all is loaded from the fastest place that has it."""
        start, copied, loads = self._tree.root.end, 0, {}
        for key, length in zip(keys, tokens, strict=True):
            if self.has_copy(key):
                copied += length
                if places is not None and (nodes := (self._tree.nodes_of or {}).get(key)):
                    host, disk = min((places.loads(node) for node in nodes), key=lambda found: found[::-1])
                    loads[key] = host * self._tree.block_size, disk * self._tree.block_size
        computed = sum(tokens) - copied
        # All documents on a cached path have copies: at least those.
        return Rest(lambda end: computed + self._recompute * (copied - (end - start)), loads)
