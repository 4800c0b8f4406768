"""The knowledge tree's KV over device, host and disk, as requests see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import torch

from ragorder.kernels.cache.copies import Copies
from ragorder.kernels.cache.disk import DiskSettings, DiskTier
from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.lease import Lease
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.cache.replicas import Replicas
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import CacheStats, TierStats, TierTokens
from ragorder.kernels.paging import BlockPool, KVShape, OutOfBlocksError, Transfers, make_transfers
from ragorder.kernels.profile import LINEAR, PrefillProfile

__all__ = ["KnowledgeCache"]


class KnowledgeCache:
    """Documents' KV in blocks, found by the path of documents in front of it, on three tiers (RAGCache section 5.1).

    A request acquires a lease on what is cached of its path, waits until that is on the device, extends the lease for
    what it computes, commits what others may use from then on, and releases it. In between, tiers that are full give up
    what `policy` values least; `history` is how many nodes each tier remembers after they went (0: none), `profile`
    says what computing takes. Of the device's pool a request can use all, in the end, but it waits (OutOfBlocksError)
    while others hold too much of it.

    A node's KV is in the blocks that cover it. Where it begins in the middle of a block, this has the parent's last
    tokens, too: it is one block for both if they were computed in one go. Who continues in another way gets a copy.

    What a step computes is committed before it is computed, so that all requests of a step share it: a step must have
    written the KV of all its tokens before any of them looks at it. The block in which an uncomputed node ends cannot
    be copied yet: who finds it computes up to `block_size` - 1 of its tokens again. If the step fails, its leases are
    to be discarded before anything else is computed.

    `identity` says which model's KV this is, for the disk. `replicate_nodes` of the most used nodes have a copy in the
    host before they leave the device. `transfers` and `executor` replace what copies, and what reads and writes files.

    All calls come from one thread; `stats` may come from any.
    Raises ValueError for settings that cannot be, MemoryError for pools that do not fit.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        device_blocks: int,
        host_blocks: int = 0,
        disk: DiskSettings | None = None,
        policy: str = "pgdsf",
        history: int = 65536,
        profile: PrefillProfile = LINEAR,
        device: torch.device | str = "cpu",
        identity: str = "",
        replicate_nodes: int = 0,
        transfers: Transfers | None = None,
        executor: Executor | None = None,
    ) -> None:
        if device_blocks < 1:
            raise ValueError(f"a device with {device_blocks} blocks holds nothing: give it 1 or more")
        if replicate_nodes < 0:
            raise ValueError(f"replicate_nodes is {replicate_nodes}: give 0 or more")
        if disk is not None and not identity:
            raise ValueError("a disk tier outlives the model: say by `identity` whose KV it keeps")
        pinned = torch.device(device).type == "cuda"
        self.shape = shape
        self.pool = BlockPool(shape, device_blocks, device)
        host = BlockPool(shape, host_blocks, pinned=pinned)
        copies = Copies(transfers or make_transfers(device))
        self._profile = profile
        self._device = MemoryTier(self.pool, copies, policy, history)
        self._host = MemoryTier(host, copies, policy, history)
        self._disk: DiskTier | None = None
        if disk is not None:
            self._disk = DiskTier(
                disk, shape, identity, copies, policy=policy, history=history, pinned=pinned, executor=executor
            )
        self._tiers = Hierarchy(self._device, self._host, self._disk, copies)
        self._tiers.failed = self._withdraw
        self._copies = copies
        self._replicas = Replicas(replicate_nodes, self._tiers)
        self._leases: dict[int, Lease] = {}
        self._requests = self._new_tokens = 0
        self._closed = False

    def acquire(self, path: Sequence[Segment]) -> Lease:
        """Hold the longest prefix of the path that is cached anywhere, and begin to load what is not on the device.

        Raises OutOfBlocksError, and changes nothing, if there is no room for that now; ValueError if the path has empty
        segments, or is longer than the pool.
        """
        lease = Lease(self, tuple(path))
        self._check_fits(sum(segment.tokens for segment in path))
        if any(segment.tokens < 1 for segment in path):
            raise ValueError("a segment has 1 or more tokens: leave empty ones out")
        self.poll()
        self._fit(lease, self._bring(path))
        self._leases[id(lease)] = lease
        return lease

    def extend(self, lease: Lease, tokens: int) -> None:
        """Have the block table hold `tokens` tokens in all. A lease that is not ready is waited for. What was committed
        before counts as computed.

        Raises OutOfBlocksError, and changes nothing, if there is no room now; ValueError if the pool is too small.
        """
        self._check_fits(tokens)
        self.computed(lease)
        lease.wait()
        grows = tokens > lease.tokens
        if grows and (needed := self._needed(lease, tokens)) > self.pool.free_blocks:
            self._make_room(lease, tokens, needed)
        if not lease.begun:
            self._begin(lease)
        if grows:
            self._own(lease)
            missing = self.shape.blocks_for(tokens) - len(lease.block_table)
            lease.block_table += self.pool.allocate(missing)
            lease.tokens = tokens

    def commit(self, lease: Lease, tokens: int) -> None:
        """The first `tokens` tokens are computed, or will be in the step that is being put together: the nodes that
        they complete are in the tree from now on. What was committed before counts as computed. A node that another
        request has committed meanwhile stays that one's.

        Raises ValueError if the lease was not extended so far.
        """
        self.computed(lease)
        if tokens > lease.tokens:
            raise ValueError(f"{tokens} tokens are committed, and {lease.tokens} have blocks: extend the lease first")
        new = [self._add(lease, segment) for segment in self._completed(lease, tokens)]
        found = [] if lease.counted else lease.path[: len(lease.held) - len(new)]
        lease.counted = True
        self._count([segment.key for segment in found], [copy.node.key for copy in new], lease.cached_tokens, tokens)

    def computed(self, lease: Lease) -> None:
        """The step that was to compute what the lease has committed has run, or the device was told all of it."""
        self._check_open(lease)
        for copy in lease.uncertain:
            copy.certain = True
        lease.uncertain.clear()

    def release(self, lease: Lease) -> None:
        """The request has ended, or waits again: its own blocks are free, what it has committed counts as computed."""
        if not lease.closed:
            self.computed(lease)
            self._replicas.offer(lease.held)
            self._close(lease)

    def discard(self, lease: Lease) -> None:
        """The step failed: what the lease has committed since the last one leaves the tree again."""
        if lease.closed:
            return
        # Children before their parents.
        for copy in reversed(lease.uncertain):
            if copy.here:
                self._tiers.remove(copy)
                self._withdraw(copy)
        lease.uncertain.clear()
        self._close(lease)

    def prefetch(self, path: Sequence[Segment]) -> None:
        """Begin to load what is cached of the path of a request that waits, as far as there is room without what is in
        use, or was loaded for others that wait."""
        self.poll()
        loaded: list[DeviceCopy] = []
        for node in self._tiers.find(path):
            absent = node.device is None
            try:
                copies = self._tiers.bring([node], _Ahead(self._tiers))
            except OutOfBlocksError:
                break
            if not copies:
                break
            copies[0].ahead |= absent
            loaded += copies
        for copy in loaded:
            self._unpin(copy)

    def poll(self) -> None:
        """Hear of loads and copies that have ended. Other calls do so, too."""
        self._tiers.poll()

    def forget_device(self) -> None:
        """The device's memory was lost, or is not to be trusted: only what host and disk have is cached from now on.
        Leases keep their blocks; discard them first."""
        self._tiers.forget_device()

    def clear(self) -> None:
        """Nothing is cached any more, nor remembered, on any tier. Leases keep their blocks."""
        for lease in self._leases.values():
            lease.uncertain.clear()
        self._tiers.clear()
        self._replicas.clear()

    def close(self) -> None:
        """Wait for what moves, write what waits to be written, and let go of the disk's folder."""
        if not self._closed:
            self._closed = True
            self._tiers.close()

    def stats(self) -> CacheStats:
        return CacheStats(
            device=_stats(self._device),
            host=_stats(self._host),
            disk=self._disk.stats() if self._disk is not None else TierStats(tokens=None),
            leases=len(self._leases),
            loads=len(self._tiers.loads),
            copies=len(self._copies),
            requests=self._requests,
            new_tokens=self._new_tokens,
        )

    def _bring(self, path: Sequence[Segment]) -> list[DeviceCopy]:
        nodes = self._tiers.find(path)
        try:
            return self._tiers.bring(nodes)
        except OutOfBlocksError:
            if self._leases:
                raise
        # Nobody will give anything back.
        self._tiers.squeeze([node.device for node in nodes if node.device is not None])
        nodes = self._tiers.find(path)
        while True:
            try:
                return self._tiers.bring(nodes)
            except OutOfBlocksError:
                nodes.pop()

    def _make_room(self, lease: Lease, tokens: int, needed: int) -> None:
        try:
            self._tiers.make_room(needed)
        except OutOfBlocksError:
            if len(self._leases) > 1:
                raise
            # Nobody will give anything back.
            self._tiers.squeeze(lease.held)
            self._tiers.make_room(self._needed(lease, tokens))

    def _needed(self, lease: Lease, tokens: int) -> int:
        missing = self.shape.blocks_for(tokens) - len(lease.block_table)
        return max(0, missing) + self._must_copy(lease)

    def _must_copy(self, lease: Lease) -> bool:
        """Whether the block that is written next has anybody's tokens in it behind those of the lease."""
        place = lease.tokens // self.shape.block_size
        if place >= lease.own:
            return False
        block = lease.block_table[place]
        ours = 1
        for copy in reversed(lease.held):
            if copy.here:
                if copy.blocks[-1] != block:
                    break
                ours += 1
        return self.pool.references(block) > ours

    def _own(self, lease: Lease) -> None:
        """Let the lease write behind its tokens. If nobody else does, the block is the lease's as it is."""
        place = lease.tokens // self.shape.block_size
        if self._must_copy(lease):
            (block,) = self.pool.allocate(1)
            self.pool.copy(lease.block_table[place], block)
            self.pool.release((lease.block_table[place],))
            lease.block_table[place] = block
        lease.own = min(lease.own, place)

    def _begin(self, lease: Lease) -> None:
        lease.begun = True
        for copy in lease.held:
            copy.origin, copy.ahead = "device", False
        self._requests += 1
        for tier, tokens in zip((self._device, self._host, self._disk), lease.tokens_by_tier, strict=True):
            if tier is not None:
                tier.hit_tokens += tokens

    def _completed(self, lease: Lease, tokens: int) -> Iterator[Segment]:
        """The nodes that the lease does not hold yet, and that end within the first `tokens` tokens."""
        while len(lease.held) < len(lease.path):
            segment = lease.path[len(lease.held)]
            if lease.committed + segment.tokens > tokens:
                return
            yield segment
            lease.committed += segment.tokens

    def _add(self, lease: Lease, segment: Segment) -> DeviceCopy:
        node = self._tiers.nodes.get(segment.key)
        copy = node.device if node is not None else None
        if copy is None:
            start = lease.committed
            covering = self.shape.covering(start, segment.tokens)
            above = lease.held[-1] if lease.held else None
            parent = lease.path[len(lease.held) - 1].key if lease.held else None
            blocks = lease.block_table[covering.start : covering.stop]
            copy = self._tiers.add(segment, start, blocks, parent, above)
            lease.uncertain.append(copy)
            self._new_tokens += segment.tokens
        self._device.tier.pin(segment.key)
        lease.held.append(copy)
        return copy

    def _count(self, found: list[bytes], new: list[bytes], cached: int, tokens: int) -> None:
        """A request uses these nodes: what it computes of them costs each token its share of the request's prefill."""
        path = found + new
        if not path:
            return
        cost = self._profile.cost(cached, tokens - cached) if new else self._profile.cost(0, tokens)
        computed = frozenset(new)
        for tier in (self._device, self._host):
            if tier.pool.blocks:
                tier.tier.use(path, cost=cost, computed=computed)
        if self._disk is not None:
            self._disk.use(path, cost, computed)

    def _fit(self, lease: Lease, held: list[DeviceCopy]) -> None:
        """The lease, which has not begun, holds these nodes, as far as they can be used."""
        kept, tokens = self._usable(held)
        for copy in held[len(kept) :]:
            self._unpin(copy)
        table: list[int] = []
        for copy in kept:
            # Where two nodes cover a block, the deeper one's has the tokens of both.
            del table[copy.node.start // self.shape.block_size :]
            table += copy.blocks
        del table[self.shape.blocks_for(tokens) :]
        self.pool.retain(table)
        self.pool.release(lease.block_table)
        by_tier = dict.fromkeys(TierTokens._fields, 0)
        for copy in kept:
            by_tier[copy.origin] += min(copy.node.end, tokens) - copy.node.start
        lease.held = kept
        lease.block_table = table
        lease.own = len(table)
        lease.cached_tokens = lease.tokens = tokens
        lease.tokens_by_tier = TierTokens(**by_tier)
        lease.committed = kept[-1].node.end if kept else 0

    def _usable(self, held: list[DeviceCopy]) -> tuple[list[DeviceCopy], int]:
        """The nodes that can be used, and how many tokens of them: a block that is only partly theirs will be copied,
        or written behind their tokens, and what is not computed yet cannot be copied."""
        end = held[-1].node.end if held else 0
        whole = end - end % self.shape.block_size
        if end == whole:
            return held, end
        for place, copy in enumerate(held):
            if not copy.certain and copy.node.end > whole:
                if copy.node.start > whole:
                    return held[:place], copy.node.start
                return [other for other in held if other.node.start < whole], whole
        return held, end

    def _withdraw(self, gone: DeviceCopy) -> None:
        """A node is not on the device after all: who has found it there has found less."""
        for lease in self._leases.values():
            if not lease.begun and gone in lease.held:
                place = lease.held.index(gone)
                for copy in lease.held[place:]:
                    self._unpin(copy)
                self._fit(lease, lease.held[:place])

    def _unpin(self, copy: DeviceCopy) -> None:
        if copy.here:
            self._device.tier.unpin(copy.node.key)

    def _close(self, lease: Lease) -> None:
        lease.closed = True
        for copy in lease.held:
            self._unpin(copy)
        self.pool.release(lease.block_table)
        lease.held, lease.block_table = [], []
        del self._leases[id(lease)]

    def _check_open(self, lease: Lease) -> None:
        if lease.closed:
            raise ValueError("the lease was given back: acquire another one")

    def _check_fits(self, tokens: int) -> None:
        if self.shape.blocks_for(tokens) > self.pool.blocks:
            raise ValueError(
                f"{tokens} tokens need {self.shape.blocks_for(tokens)} blocks, and the device has {self.pool.blocks}: "
                "make the prompt shorter, or the device's pool larger"
            )


class _Ahead:
    """The keys of nodes that were loaded for requests that wait."""

    def __init__(self, tiers: Hierarchy) -> None:
        self._nodes = tiers.nodes

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, bytes) else None
        return node is not None and node.device is not None and node.device.ahead


def _stats(tier: MemoryTier) -> TierStats:
    pool = tier.pool
    return TierStats(
        nodes=len(tier.tier),
        tokens=tier.tokens,
        bytes=tier.tier.used * pool.shape.block_bytes,
        used_bytes=pool.used_bytes,
        capacity_bytes=pool.capacity_bytes,
        hit_tokens=tier.hit_tokens,
        received=tier.received,
        evicted=tier.evicted,
        failed=tier.failed,
        refused=tier.refused.copy(),
    )
