"""Documents that an engine takes over from wherever it has computed them (FusionRAG), as far as their order goes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import Self

from ragorder.settings import Settings
from ragorder.trie.residency import Places
from ragorder.trie.search import Rest
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["FusedReuse"]


class FusedReuse:
    """A scope's documents with KV off the cached prefix.

    Only what is computed directly behind the cached prefix is exact, and extends it for later requests. So documents
    without KV come there, and those that are taken over stand behind them as ranked: their order costs nothing.
    """

    def __init__(self, settings: Settings, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._recompute = settings.recompute
        self._all_copied = settings.copies == "all"

    def copy(self, tree: KnowledgeTree) -> Self:
        copy = shallow_copy(self)
        copy._tree = tree
        return copy

    def has_copy(self, key: Key) -> bool:
        return self._all_copied or key in (self._tree.nodes_of or ())

    def split(self, keys: Sequence[Key], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those to compute, and those taken over."""
        copied = [self.has_copy(keys[rank]) for rank in ranks]
        return (
            [rank for rank, has_copy in zip(ranks, copied, strict=True) if not has_copy],
            [rank for rank, has_copy in zip(ranks, copied, strict=True) if has_copy],
        )

    def places(self, keys: Sequence[Key], permutation: Sequence[int]) -> tuple[int, list[int]]:
        """The leading documents that are exact, cached or computed, and the places of those taken over."""
        node: Node | None = self._tree.root
        for place, rank in enumerate(permutation):
            child = (node.children or {}).get(keys[rank]) if node is not None else None
            if child is None and self.has_copy(keys[rank]):
                return place, [
                    behind for behind in range(place, len(permutation)) if self.has_copy(keys[permutation[behind]])
                ]
            node = child
        return len(permutation), []

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
