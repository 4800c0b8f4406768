"""Uses of nodes, and host copies of the most used (RAGCache 6)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.node import CachedNode, DeviceCopy, HostCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens
from ragorder.trie.policies.tier import NO_FORECAST
from ragorder.trie.profile import PrefillProfile


class NodeUses:
    def __init__(self, tiers: Hierarchy, profile: PrefillProfile) -> None:
        self.requests = self.new_tokens = 0
        self._tiers = tiers
        self._profile = profile

    def count_found(self, tokens: TierTokens) -> None:
        for tier, count in zip((self._tiers.device, self._tiers.host, self._tiers.disk), tokens, strict=True):
            if tier is not None:
                tier.hit_tokens += count

    def count_path(self, found: Sequence[Segment], new: Sequence[Segment], cached: int, tokens: int) -> None:
        """Count a request's nodes. New ones share the cost of the prefill from `cached` to `tokens`."""
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

    def _count(
        self,
        path: Sequence[bytes],
        cost: float,
        computed: Container[bytes] = (),
        expected: Mapping[bytes, float] = NO_FORECAST,
    ) -> None:
        for tier in (self._tiers.device, self._tiers.host):
            if tier.pool.blocks:
                tier.tier.use(path, cost=cost, computed=computed, expected=expected)
        if self._tiers.disk is not None:
            self._tiers.disk.use(path, cost, computed, expected)


def tokens_by_tier(nodes: Iterable[CachedNode]) -> TierTokens:
    return TierTokens.of(("device" if each.device else "host" if each.host else "disk", each.tokens) for each in nodes)


# Share of the host's blocks; evicted nodes of the device use the rest.
_MOST = 0.5


class Replicas:
    """The `count` most used nodes, pinned in the host. Parents are used as often as their children, or more."""

    def __init__(self, count: int, tiers: Hierarchy) -> None:
        self._count = count
        self._tiers = tiers
        self._nodes: dict[bytes, _Replica] = {}
        self._blocks = 0
        self.resize(tiers.host.pool.blocks)

    def __len__(self) -> int:
        return len(self._nodes)

    def offer(self, path: Iterable[DeviceCopy]) -> None:
        if not self._count:
            return
        for copy in path:
            if not copy.ready or copy.entry is None or copy.entry.frequency < 2:
                return
            if not self._replicate(copy.node, len(copy.blocks), copy.entry.frequency):
                return

    def resize(self, host_blocks: int) -> None:
        self._most_blocks = int(_MOST * host_blocks)

    def unpin_all(self) -> None:
        for replica in list(self._nodes.values()):
            self._forget(replica)

    def clear(self) -> None:
        self._nodes.clear()
        self._blocks = 0

    def _replicate(self, node: CachedNode, blocks: int, frequency: int) -> bool:
        replica = self._nodes.get(node.key)
        if replica is not None and replica.copy is node.host:
            replica.frequency = frequency
            return True
        for lost in [each for each in self._nodes.values() if each.node.host is not each.copy]:
            self._forget(lost)
        weaker = self._weaker(blocks, frequency)
        if weaker is None:
            return False
        copy = self._tiers.copy_to_host(node)
        if copy is None:
            return False
        for each in weaker:
            self._forget(each)
        self._tiers.host.tier.pin(node.key)
        self._nodes[node.key] = _Replica(node, copy, len(copy.blocks), frequency)
        self._blocks += len(copy.blocks)
        return True

    def _weaker(self, blocks: int, frequency: int) -> list[_Replica] | None:
        missing_nodes = len(self._nodes) + 1 - self._count
        missing_blocks = self._blocks + blocks - self._most_blocks
        by_use = sorted(self._nodes.values(), key=lambda each: -each.frequency)
        weaker: list[_Replica] = []
        while missing_nodes > 0 or missing_blocks > 0:
            if not by_use:
                return None
            weakest = by_use.pop()
            if weakest.frequency >= frequency:
                # Old uses decay, so that each replica is replaced in the end.
                weakest.frequency -= 1
                return None
            weaker.append(weakest)
            missing_nodes -= 1
            missing_blocks -= weakest.blocks
        return weaker

    def _forget(self, replica: _Replica) -> None:
        del self._nodes[replica.node.key]
        self._blocks -= replica.blocks
        # False if its copy to the host has failed.
        if replica.node.host is replica.copy:
            self._tiers.host.tier.unpin(replica.node.key)


@dataclass(slots=True, eq=False, repr=False)
class _Replica:
    node: CachedNode
    copy: HostCopy
    blocks: int
    frequency: int
