"""Residency corrected by what the engine reports of each answer."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.trie.residency.base import Lease, TokenIds
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.tree import Node

__all__ = ["FeedbackResidency"]


class FeedbackResidency:
    """Corrects another residency from the cached tokens that an engine reports.

    An engine evicts in order of use: if a request found a block gone, whatever was last used before it is gone as well.
    Less than a block of difference says nothing, nor does a block that another request was about to fill.
    """

    def __init__(self, mirror: LRUResidency) -> None:
        self.mirror = mirror
        self.tree = mirror.tree
        self.corrections = 0

    def refresh(self) -> None:
        self.mirror.refresh()

    def lease(self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = ()) -> Lease:
        return self.mirror.lease(path, suffix_tokens, token_ids)

    def release(self, lease: Lease, cached_tokens: float | None = None, total_tokens: float | None = None) -> None:
        if cached_tokens is not None and cached_tokens <= lease.cached_tokens - self.tree.block_size and lease.open:
            self.corrections += 1
            self.mirror.correct(lease)
        self.mirror.release(lease, None, total_tokens)

    def cancel(self, lease: Lease) -> None:
        self.mirror.cancel(lease)
