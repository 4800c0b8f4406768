"""Uses of nodes by requests, counted for policies and statistics."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ragorder.kernels.cache.disk import StoreTier
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import CachedNode
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens
from ragorder.trie.policies.tier import NO_FORECAST
from ragorder.trie.profile import PrefillProfile

__all__ = ["NodeUses", "tokens_by_tier"]


class NodeUses:
    def __init__(self, device: MemoryTier, host: MemoryTier, disk: StoreTier | None, profile: PrefillProfile) -> None:
        self.requests = self.new_tokens = 0
        self._device = device
        self._host = host
        self._disk = disk
        self._profile = profile

    def count_found(self, tokens: TierTokens) -> None:
        for tier, count in zip((self._device, self._host, self._disk), tokens, strict=True):
            if tier is not None:
                tier.hit_tokens += count

    def count_path(self, found: Sequence[Segment], new: Sequence[Segment], cached: int, tokens: int) -> None:
        """Count a request's nodes. New tokens cost their share of the prefill of `tokens` after `cached` ones."""
        segments = [*found, *new]
        if not segments:
            return
        keys = [segment.key for segment in segments]
        cost = self._profile.cost(cached, tokens - cached) if new else self._profile.cost(0, tokens)
        computed = frozenset(segment.key for segment in new)
        expected = {segment.key: segment.expected_uses for segment in segments if segment.expected_uses}
        self._count(keys, cost, computed, expected)

    def count_borrowed(self, keys: Sequence[bytes], end: int) -> None:
        self._count(keys, self._profile.cost(0, end))

    def count_adopted(self, node: CachedNode) -> None:
        self.new_tokens += node.tokens
        self._count([node.key], self._profile.cost(node.start, node.tokens), (node.key,))

    def _count(
        self,
        path: Sequence[bytes],
        cost: float,
        computed: Container[bytes] = (),
        expected: Mapping[bytes, float] = NO_FORECAST,
    ) -> None:
        for tier in (self._device, self._host):
            if tier.pool.blocks:
                tier.tier.use(path, cost=cost, computed=computed, expected=expected)
        if self._disk is not None:
            self._disk.use(path, cost, computed, expected)


def tokens_by_tier(nodes: Iterable[CachedNode]) -> TierTokens:
    tokens = dict.fromkeys(TierTokens._fields, 0)
    for node in nodes:
        tier = "device" if node.device is not None else "host" if node.host is not None else "disk"
        tokens[tier] += node.tokens
    return TierTokens(**tokens)
