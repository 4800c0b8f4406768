"""Memory tier: a pool of blocks and the nodes in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import cast

from ragorder.kernels.cache.copies import Copies
from ragorder.kernels.cache.stats import CacheTierStats
from ragorder.kernels.paging import BlockPool, OutOfBlocksError
from ragorder.trie.policies import History, Tier, TierNode, make_policy


class MemoryTier:
    def __init__(self, pool: BlockPool, copies: Copies, policy: str, history: int) -> None:
        self.pool = pool
        self.tier = Tier(make_policy(policy), History(history) if history else None)
        self.tokens = self.received = self.evicted = self.failed = self.hit_tokens = 0
        self.refused: Counter[str] = Counter()
        self._copies = copies

    def insert(
        self, key: bytes, size: int, parent: bytes | None, tokens: int, known: TierNode | None = None
    ) -> TierNode | None:
        self.tier.insert(key, size, parent, known=known)
        self.tokens += tokens
        return self.tier.get(key)

    def remove(self, key: bytes, tokens: int) -> None:
        self.tier.remove(key)
        self.tokens -= tokens

    def resize(self, key: bytes, size: int) -> TierNode | None:
        entry = self.tier.get(key)
        if entry is None:
            raise KeyError("the node is not in this tier")
        pins, parent = entry.pins, cast("bytes | None", entry.parent)
        self.tier.remove(key)
        self.tier.insert(key, size, parent, known=entry)
        for _ in range(pins):
            self.tier.pin(key)
        return self.tier.get(key)

    def evict(self, blocks: int, protected: Container[bytes] = ()) -> list[bytes]:
        """Evict until `blocks` blocks are free once copies end. Return the keys, children first. Raises
        OutOfBlocksError, evicting nothing."""
        missing = blocks - self.pool.free_blocks
        if missing > 0:
            missing -= self._copies.leaving(self.pool)
        if missing <= 0:
            return []
        evicted = cast("list[bytes] | None", self.tier.evict(missing, protected))
        if evicted is None:
            raise OutOfBlocksError(
                f"{blocks} blocks are needed, but only {self.pool.free_blocks} are free and the others in use"
            )
        self.evicted += len(evicted)
        return evicted

    def evict_unpinned(self) -> list[bytes]:
        evicted = cast("list[bytes]", list(self.tier.victims()))
        for key in evicted:
            self.tier.remove(key)
        self.evicted += len(evicted)
        return evicted

    def stats(self) -> CacheTierStats:
        return CacheTierStats(
            nodes=len(self.tier),
            tokens=self.tokens,
            bytes=self.tier.used * self.pool.shape.block_bytes,
            used_bytes=self.pool.used_bytes,
            capacity_bytes=self.pool.capacity_bytes,
            hit_tokens=self.hit_tokens,
            received=self.received,
            evicted=self.evicted,
            failed=self.failed,
            refused=dict(self.refused),
        )
