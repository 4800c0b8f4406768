"""A tier in memory: a pool of blocks, and whose they are."""

from __future__ import annotations

from collections.abc import Container
from typing import cast

from ragorder.kernels.cache.copies import Copies
from ragorder.kernels.paging import BlockPool, OutOfBlocksError
from ragorder.kernels.policies import History, Tier, TierNode, make_policy

__all__ = ["MemoryTier"]


class MemoryTier:
    """Who is in a pool, and who goes first (`ragorder.kernels.policies`). The tier's sizes are in blocks. Counts what
    it holds and has done; `refused` is by reason."""

    def __init__(self, pool: BlockPool, copies: Copies, policy: str, history: int) -> None:
        self.pool = pool
        self.tier = Tier(make_policy(policy), History(history) if history else None)
        self.tokens = self.received = self.evicted = self.failed = self.hit_tokens = 0
        self.refused: dict[str, int] = {}
        self._copies = copies

    def insert(
        self, key: bytes, size: int, parent: bytes | None, tokens: int, known: TierNode | None = None
    ) -> TierNode | None:
        """A node has come in: what the policy knows of it from now on."""
        self.tier.insert(key, size, parent, known=known)
        self.tokens += tokens
        return self.tier.get(key)

    def remove(self, key: bytes, tokens: int) -> None:
        """A node has gone, for another reason than room."""
        self.tier.remove(key)
        self.tokens -= tokens

    def resize(self, key: bytes, size: int) -> TierNode | None:
        """A node takes another number of blocks: what the policy knows of it from now on."""
        entry = self.tier.get(key)
        if entry is None:
            raise KeyError("the tier does not hold this node")
        pins, parent = entry.pins, cast("bytes | None", entry.parent)
        self.tier.remove(key)
        self.tier.insert(key, size, parent, known=entry)
        for _ in range(pins):
            self.tier.pin(key)
        return self.tier.get(key)

    def victims(self, blocks: int, protected: Container[bytes] = ()) -> list[bytes]:
        """Take out whoever must go for so many blocks to be free once the copies under way have ended, children first.

        Raises OutOfBlocksError, and takes out nobody, if that cannot be.
        """
        missing = blocks - self.pool.free_blocks
        if missing > 0:
            missing -= self._copies.leaving(self.pool)
        if missing <= 0:
            return []
        # Every key was a node's.
        going = cast("list[bytes] | None", self.tier.evict(missing, protected))
        if going is None:
            raise OutOfBlocksError(f"{blocks} blocks are needed, and all but {self.pool.free_blocks} are in use")
        self.evicted += len(going)
        return going

    def emptied(self) -> list[bytes]:
        """Take out all that is not pinned, nor above what is."""
        going = cast("list[bytes]", list(self.tier.victims()))
        for key in going:
            self.tier.remove(key)
        self.evicted += len(going)
        return going

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
