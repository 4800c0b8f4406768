"""Residency corrected by the engine's reported cached tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ragorder.trie.histories import TurnEnd
from ragorder.trie.residency.base import Lease, Reported
from ragorder.trie.residency.lengths import LearnedLengths, ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.tree import Node, RequestedDocuments, TokenIds

_ESTIMATES_EXCEED = 4 / 3


class FeedbackResidency:
    """Corrects another residency from the engine's reports.

    Engines evict in order of use: with a block, everything used before it was evicted. Differences below a block are
    ignored, and with estimated lengths all but clear ones.
    """

    def __init__(self, mirror: LRUResidency, lengths: ScopeLengths | None = None) -> None:
        self.mirror = mirror
        self.tree = mirror.tree
        self.lengths = LearnedLengths().of(None) if lengths is None else lengths
        self._learns = not mirror.knows_tokens
        self._ratio = self.lengths.ratio
        self._version = -1
        self._confirmed = False
        if mirror.pool.losses is None:
            mirror.pool.losses = self.lengths.engine.losses

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        if self._version != self.lengths.version:
            self._follow()
        self.mirror.refresh(requested)
        if self._learns:
            return
        pool = self.mirror.pool
        if pool.capacity_blocks != pool.passed_on_blocks:
            if pool.capacity_blocks < pool.passed_on_blocks:
                self._pass_on(pool.used_blocks)
            pool.passed_on_blocks = pool.capacity_blocks

    def _follow(self) -> None:
        lengths, root = self.lengths, self.tree.root
        self._version = lengths.version
        if self._learns and (lengths.prefix_tokens not in (None, root.end) or lengths.ratio != self._ratio):
            prefix_tokens = root.end if lengths.prefix_tokens is None else lengths.prefix_tokens
            self.mirror.resize(prefix_tokens, lengths.ratio / self._ratio)
            self._ratio = lengths.ratio
        pool = self.mirror.pool
        if pool.losses != lengths.engine.losses:
            pool.losses = lengths.engine.losses
            pool.shrink_to(lengths.engine.kept_blocks, self.mirror)

    def _pass_on(self, kept_blocks: int) -> None:
        self.lengths.engine.learn_loss(kept_blocks)
        self.mirror.pool.losses = self.lengths.engine.losses

    def lease(
        self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = (), turn: TurnEnd | None = None
    ) -> Lease:
        return self.mirror.lease(path, suffix_tokens, token_ids, turn)

    def release(
        self,
        lease: Lease,
        cached_tokens: Reported = None,
        total_tokens: Reported = None,
        prompt_tokens: Reported = None,
    ) -> None:
        if lease.open:
            if prompt_tokens is not None and (lease.turn is None or lease.turn.opens):
                last = lease.path[-1 if lease.turn is None else lease.turn.documents]
                self.learn_prompt(last.end - self.tree.root.end, prompt_tokens)
            if cached_tokens is not None:
                self._learn(lease, cached_tokens)
        self.mirror.release(lease, None, total_tokens)

    def learn_prompt(self, documents_tokens: int, prompt_tokens: float) -> None:
        if self._learns:
            self.lengths.learn_prompt(documents_tokens, prompt_tokens)

    def cancel(self, lease: Lease) -> None:
        self.mirror.cancel(lease)

    def _learn(self, lease: Lease, cached_tokens: float) -> None:
        lengths, root, size = self.lengths, self.tree.root, self.tree.block_size
        last = lease.path[lease.cached_documents]
        # If the engine holds part of a document, the mirror may have the wrong part.
        certain = _ends_in_documents(lease) and lease.cached_tokens == last.end // size * size
        if self._learns and certain:
            lengths.learn_hit(root.end, last.end - root.end, cached_tokens, size)
        likely_tokens = cached_tokens * (_ESTIMATES_EXCEED if lengths.estimated else 1)
        # A learned prefix may be wrong by some tokens, hence by a block.
        if likely_tokens > lease.cached_tokens - (size if lengths.prefix_tokens is None else 2 * size):
            self._confirmed = self._confirmed or last is not root
            return
        # A template may change a generated answer: it is recomputed, although nothing was evicted.
        if last is not root and cached_tokens >= _history_sent(lease) - 2 * size:
            return
        # Every request uses the prefix, so a smaller report means a shorter prefix, not an eviction.
        if (last is root and cached_tokens > 0) or lengths.prefix_tokens not in (None, root.end):
            return
        # A scope without any hits, say because its prompts contain the time of day, is no evidence about other scopes.
        alone = not self._confirmed and len(self.mirror.pool.holders) > 1
        self._confirmed = False
        kept_blocks = self.mirror.correct(lease, alone=alone)
        if kept_blocks is not None and not alone:
            self._pass_on(kept_blocks)


def _ends_in_documents(lease: Lease) -> bool:
    if lease.turn is None:
        return lease.path[lease.cached_documents] is not lease.path[-1]
    return not lease.turn.history_nodes and lease.cached_documents < lease.turn.documents


def _history_sent(lease: Lease) -> float:
    return lease.path[lease.turn.history_nodes - 1].end if lease.turn is not None and lease.turn.history_nodes else inf
