"""The knowledge cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain
from math import ceil

import torch

from ragorder.kernels.cache.contents import Contents, DocumentIndex
from ragorder.kernels.cache.copies import Copies
from ragorder.kernels.cache.disk import DiskSettings, StoreTier
from ragorder.kernels.cache.hierarchy import Hierarchy
from ragorder.kernels.cache.lease import BlockTables, Borrowed, KVLease
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import CachedNode, CopyState, DeviceCopy
from ragorder.kernels.cache.resizing import PoolSizes, load_prefix, make_room
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import CacheStats, CacheTierStats, TierTokens
from ragorder.kernels.cache.uses import NodeUses, Replicas, tokens_by_tier
from ragorder.kernels.paging import (
    BlockPool,
    KVShape,
    LayeredPool,
    OutOfBlocksError,
    Transfers,
    make_transfers,
)
from ragorder.trie.policies import Key
from ragorder.trie.profile import LINEAR, PrefillProfile


def prefetch(tiers: Hierarchy, nodes: Iterable[CachedNode]) -> list[DeviceCopy]:
    """Begin to load nodes, evicting no prefetched ones. Return copies, each pinned once."""
    loaded: list[DeviceCopy] = []
    # One by one, so that a document that appears twice is loaded once.
    for node in nodes:
        absent = node.device is None
        try:
            copies = tiers.load([node], _Prefetched(tiers))
        except OutOfBlocksError:
            break
        if not copies:
            break
        copies[0].prefetched |= absent
        loaded += copies
    return loaded


class _Prefetched:
    def __init__(self, tiers: Hierarchy) -> None:
        self._nodes = tiers.nodes

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, bytes) else None
        return node is not None and node.device is not None and node.device.prefetched


def purge(tiers: Hierarchy, keys: Iterable[bytes], found: Iterable[bytes] = ()) -> list[DeviceCopy]:
    disk = tiers.disk
    tiers.drain()
    if disk is not None:
        disk.wait()
    removed = []
    for key in _with_descendants(tiers, [*keys, *(key for key in found if _is_broken(tiers, key))]):
        node = tiers.nodes.get(key)
        if node is not None and (copy := tiers.drop(node)) is not None:
            removed.append(copy)
        if disk is not None:
            disk.remove(key)
    return removed


def _with_descendants(tiers: Hierarchy, keys: Iterable[bytes]) -> Iterable[bytes]:
    parents = {key: node.parent for key, node in tiers.nodes.items()}
    if tiers.disk is not None:
        parents |= tiers.disk.parents()
    children = defaultdict(list)
    for key, parent in parents.items():
        children[parent].append(key)
    found: dict[bytes, None] = {}
    left = list(keys)
    while left:
        key = left.pop()
        if key not in found:
            found[key] = None
            left += children[key]
    return found


def _is_broken(tiers: Hierarchy, key: bytes) -> bool:
    node = tiers.nodes.get(key)
    if node is None:
        return False
    copies = (tiers.device.pool, node.device), (tiers.host.pool, node.host)
    return any(copy is not None and not _are_numbers(pool, copy.blocks, node) for pool, copy in copies)


def _are_numbers(pool: BlockPool, blocks: Sequence[int], node: CachedNode) -> bool:
    # The first and last block may have tokens of other nodes.
    first = node.start % pool.shape.block_size
    rows = pool.read(list(blocks)).movedim(3, 1).flatten(0, 1)
    return bool(rows[first : first + node.tokens].isfinite().all())


class KnowledgeCache:
    """KV of documents in blocks, keyed by path, on three tiers (RAGCache 5.1). One thread calls everything but `stats`.

        lease = cache.acquire(segments_of(token_ids, ends))
        cache.extend(lease, len(token_ids))
        cache.commit(lease, len(token_ids))  # others may share the nodes: compute from lease.cached_tokens on
        cache.release(lease)

    Nodes are committed before their step runs, so it must write all its KV before reading any; discard its leases first
    if it fails. A lease may borrow copies of documents outside its cached prefix (FusionRAG 4.1): read them from
    `extend` until `give_back` or the lease's end. The `replicate_nodes` most used nodes are copied to the host early.
    `layers_in_host`, which may be empty, have requests' KV in host memory at first; None rules out `move_layer`.
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
        layers_in_host: Sequence[int] | None = None,
    ) -> None:
        if device_blocks < 1:
            raise ValueError(f"device_blocks is {device_blocks}: give 1 or more")
        if replicate_nodes < 0:
            raise ValueError(f"replicate_nodes is {replicate_nodes}: give 0 or more")
        if disk is not None and not identity:
            raise ValueError("a disk tier outlives the process: give the identity of the model that computes its KV")
        pinned = torch.device(device).type == "cuda"
        self.shape = shape
        self.pool: BlockPool
        if layers_in_host is None:
            self.pool = BlockPool(shape, device_blocks, device)
        else:
            self.pool = LayeredPool(shape, device_blocks, device, layers_in_host)
        host = BlockPool(shape, host_blocks, pinned=pinned)
        copies = Copies(transfers or make_transfers(device))
        device_tier, host_tier = (MemoryTier(pool, copies, policy, history) for pool in (self.pool, host))
        store = None
        if disk is not None:
            store = StoreTier(
                disk, shape, identity, copies, policy=policy, history=history, pinned=pinned, executor=executor
            )
        self._tiers = Hierarchy(device_tier, host_tier, store, copies, self._withdraw)
        self._replicas = Replicas(replicate_nodes, self._tiers)
        self.contents = Contents(self._tiers.holds)
        self._index = DocumentIndex(self.contents, self._tiers)
        self._tables = BlockTables(self.pool)
        self._uses = NodeUses(self._tiers, profile)
        self._leases: dict[int, KVLease] = {}
        self._sizes = PoolSizes(self._tiers, self._replicas, self._leases)
        self._closed = False

    def find(self, path: Sequence[Segment]) -> TierTokens:
        return tokens_by_tier(self._tiers.match(path))

    def find_copies(self, path: Sequence[Segment]) -> TierTokens:
        return tokens_by_tier(node for _, node in self._index.nodes(path, len(self._tiers.match(path))))

    def have_copies(self, path: Sequence[Segment]) -> list[bool]:
        return self._index.known(path)

    def acquire(
        self, path: Sequence[Segment], *, borrow: bool = False, tokens: int = 0, recompute: float = 0.0
    ) -> KVLease:
        """Pin the longest cached prefix and begin to load it. `borrow` also pins copies of later documents that fit
        beside the rest of the request's `tokens` and their share to `recompute`. Raises OutOfBlocksError, changing
        nothing."""
        lease = KVLease(tuple(path), self._tiers.poll)
        self._check_fits(sum(segment.tokens for segment in path))
        if any(segment.tokens < 1 for segment in path):
            raise ValueError("a segment has no tokens: leave out empty segments")
        self.poll()
        self._map(lease, load_prefix(self._tiers, path, alone=not self._leases))
        self._leases[id(lease)] = lease
        if borrow:
            try:
                self._borrow(lease, tokens, recompute)
            except OutOfBlocksError:
                self._close(lease)
                raise
        return lease

    def extend(self, lease: KVLease, tokens: int) -> None:
        """Wait for the loads and grow to `tokens` tokens. Implies `mark_computed`. Raises OutOfBlocksError."""
        self._check_fits(tokens)
        self.mark_computed(lease)
        lease.wait()
        if not lease.started:
            self._retain_borrowed(lease)
        grows = tokens > lease.tokens
        if grows and self._tables.needed(lease, tokens) > self.pool.free_blocks:
            make_room(self._tiers, self._tables, lease, tokens, alone=len(self._leases) == 1)
        if not lease.started:
            self._start(lease)
        if grows:
            self._tables.grow(lease, tokens)

    def count_borrowed(self, lease: KVLease, computed: Container[bytes] = ()) -> TierTokens:
        """Count the use of borrowed nodes. Return the tokens of those not `computed`."""
        new = (each for each in lease.borrowed if each.copy.node.key not in computed)
        found = TierTokens.of((each.copy.origin, each.tokens) for each in new)
        for borrowed in lease.borrowed:
            borrowed.copy.origin, borrowed.copy.prefetched = "device", False
        if lease.borrowed:
            self._uses.count_found(found)
            last = lease.borrowed[-1]
            self._uses.count_borrowed([borrowed.copy.node.key for borrowed in lease.borrowed], last.start + last.tokens)
        return found

    def give_back(self, lease: KVLease) -> None:
        """End the borrowing, once all reads of its KV are queued."""
        self._keep_borrowed(lease, [])

    def commit(self, lease: KVLease, tokens: int) -> None:
        """Insert nodes within the first `tokens` tokens, or share equal ones. Implies `mark_computed`."""
        self.mark_computed(lease)
        if tokens > lease.tokens:
            raise ValueError(
                f"{tokens} tokens are committed, but only {lease.tokens} have blocks: extend the lease first"
            )
        new = [self._insert(lease, segment) for segment in self._completed(lease, tokens)]
        known = len(lease.pinned) - len(new)
        found = [] if lease.counted else lease.path[:known]
        lease.counted = True
        self._uses.count_path(found, lease.path[known : known + len(new)], lease.cached_tokens, tokens)

    def mark_computed(self, lease: KVLease) -> None:
        """Mark pending nodes READY: their step has run or is queued."""
        if lease.closed:
            raise ValueError("the lease was released: acquire another one")
        for copy in lease.pending:
            if copy.state is CopyState.PENDING:
                copy.state = CopyState.READY
        lease.pending.clear()

    def release(self, lease: KVLease) -> None:
        """End the lease; committed nodes stay. Implies `mark_computed`."""
        if not lease.closed:
            self.mark_computed(lease)
            self._replicas.offer(lease.pinned)
            self._close(lease)

    def discard(self, lease: KVLease) -> None:
        """End the lease after a failed step and remove its pending nodes."""
        if lease.closed:
            return
        for copy in reversed(lease.pending):
            if copy.resident:
                self._tiers.remove(copy)
                self._withdraw(copy)
        lease.pending.clear()
        self._close(lease)

    def purge(self, keys: Iterable[bytes], *, found: Iterable[bytes] = ()) -> None:
        """Remove nodes, of `found` those with NaN or inf, and all descendants from all tiers. Leases keep their blocks,
        but commit nothing after such a node."""
        for copy in purge(self._tiers, keys, found):
            self._withdraw(copy)
            for lease in self._leases.values():
                if copy in lease.pinned:
                    lease.path = lease.path[: len(lease.pinned)]

    def expect(self, path: Sequence[Segment], *, borrow: bool = False) -> tuple[Key, ...]:
        """Announce a waiting request until `settle`: its nodes, up to half of the host, leave the host last."""
        nodes = [(segment.key, segment.tokens) for segment in path]
        if borrow:
            nodes += [(node.key, node.tokens) for _, node in self._index.nodes(path, len(self._tiers.match(path)))]
        return self._tiers.awaited.add(nodes)

    def settle(self, expected: Sequence[Key]) -> None:
        self._tiers.awaited.remove(expected)

    def prefetch(self, path: Sequence[Segment], *, borrow: bool = False) -> None:
        """Begin to load a waiting request's nodes, evicting no pinned or prefetched ones."""
        self.poll()
        nodes = self._tiers.match(path)
        copies = self._index.nodes(path, len(nodes)) if borrow else iter(())
        for copy in prefetch(self._tiers, chain(nodes, (node for _, node in copies))):
            self._unpin(copy)

    def poll(self) -> None:
        self._tiers.poll()

    def resize(self, *, device_blocks: int | None = None, host_blocks: int | None = None) -> None:
        """Resize pools between two steps; leases' blocks may be renumbered. Raises OutOfBlocksError if used blocks do
        not fit, MemoryError without room for old and new pool, changing nothing."""
        if device_blocks is not None:
            if device_blocks < 1:
                raise ValueError(f"device_blocks is {device_blocks}: give 1 or more")
            self._sizes.resize_device(device_blocks)
        if host_blocks is not None:
            self._sizes.resize_host(host_blocks)

    @property
    def layers_in_host(self) -> tuple[int, ...]:
        """Layers with requests' KV in host memory."""
        return self.pool.in_host if isinstance(self.pool, LayeredPool) else ()

    def move_layer(self, layer: int, *, to_host: bool) -> None:
        """Move requests' KV of a layer between two steps. Raises MemoryError, changing nothing; ValueError unless the
        pool is layered."""
        if not isinstance(self.pool, LayeredPool):
            raise ValueError("the pool is not layered: all its KV stays on the device")
        self._tiers.drain()
        self.pool.move(layer, to_host=to_host)

    def replace_device(self, blocks: int) -> None:
        """Move the device's KV down a tier, and replace the pool. Raises MemoryError; ValueError while leases exist."""
        self._sizes.replace_device(blocks)

    def forget_device(self) -> None:
        if self._leases:
            raise ValueError(f"{len(self._leases)} leases hold blocks of the device: discard them first")
        self._tiers.forget_device()

    def clear(self) -> None:
        """Empty all tiers and histories. Leases keep their blocks."""
        for lease in self._leases.values():
            lease.pending.clear()
        self._tiers.clear()
        self._replicas.clear()
        self.contents.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tiers.close()

    def stats(self) -> CacheStats:
        tiers = self._tiers
        return CacheStats(
            device=tiers.device.stats(),
            host=tiers.host.stats(),
            disk=tiers.disk.stats() if tiers.disk is not None else CacheTierStats(tokens=None),
            leases=len(self._leases),
            loads=len(tiers.loads),
            copies=len(tiers.copies),
            requests=self._uses.requests,
            new_tokens=self._uses.new_tokens,
        )

    def _map(self, lease: KVLease, pinned: list[DeviceCopy]) -> None:
        for copy in self._tables.map(lease, pinned):
            self._unpin(copy)

    def _start(self, lease: KVLease) -> None:
        lease.started = True
        for copy in lease.pinned:
            copy.origin, copy.prefetched = "device", False
        self._uses.requests += 1
        self._uses.count_found(lease.tokens_by_tier)
        parent, start = None, 0
        for segment in lease.path[: len(lease.pinned)]:
            self._index.add(segment, parent, start)
            parent, start = segment.key, start + segment.tokens

    def _borrow(self, lease: KVLease, tokens: int, recompute: float) -> None:
        own: float = max(tokens, sum(segment.tokens for segment in lease.path))
        room = self.pool.blocks
        for start, node in self._index.nodes(lease.path, len(lease.pinned)):
            size = len(self.shape.covering(node.start, node.tokens))
            rest = own - node.tokens * (1 - recompute)
            if size + self.shape.blocks_for(ceil(rest)) > room:
                continue
            own, room = rest, room - size
            try:
                copies = self._tiers.load([node])
            except OutOfBlocksError:
                if len(self._leases) > 1:
                    raise
                # No other lease will free blocks.
                return
            lease.borrowed += [Borrowed(start, copy) for copy in copies]

    def _retain_borrowed(self, lease: KVLease) -> None:
        self._keep_borrowed(lease, [each for each in lease.borrowed if each.blocks or each.copy.ready])
        for borrowed in lease.borrowed:
            if not borrowed.blocks:
                # The copy may go, or get other blocks, while these are read.
                borrowed.blocks = list(borrowed.copy.blocks)
                self.pool.retain(borrowed.blocks)

    def _keep_borrowed(self, lease: KVLease, kept: list[Borrowed]) -> None:
        for borrowed in lease.borrowed:
            if borrowed not in kept:
                self._unpin(borrowed.copy)
                self.pool.release(borrowed.blocks)
        lease.borrowed = kept

    def _completed(self, lease: KVLease, tokens: int) -> Iterator[Segment]:
        while len(lease.pinned) < len(lease.path):
            segment = lease.path[len(lease.pinned)]
            if lease.committed + segment.tokens > tokens:
                return
            yield segment
            lease.committed += segment.tokens

    def _insert(self, lease: KVLease, segment: Segment) -> DeviceCopy:
        node = self._tiers.nodes.get(segment.key)
        copy = node.device if node is not None else None
        start = lease.committed
        parent = lease.path[len(lease.pinned) - 1].key if lease.pinned else None
        if copy is None:
            covering = self.shape.covering(start, segment.tokens)
            blocks = lease.block_table[covering.start : covering.stop]
            copy = self._tiers.insert(segment, start, blocks, parent, lease.pinned)
            lease.pending.append(copy)
            self._uses.new_tokens += segment.tokens
        self._index.add(segment, parent, start)
        self._tiers.device.tier.pin(segment.key)
        lease.pinned.append(copy)
        return copy

    def _withdraw(self, gone: DeviceCopy) -> None:
        # Shorten the leases that found a node whose load or step failed.
        for lease in self._leases.values():
            if lease.started:
                continue
            self._keep_borrowed(lease, [borrowed for borrowed in lease.borrowed if borrowed.copy is not gone])
            if gone in lease.pinned:
                place = lease.pinned.index(gone)
                for copy in lease.pinned[place:]:
                    self._unpin(copy)
                self._map(lease, lease.pinned[:place])

    def _unpin(self, copy: DeviceCopy) -> None:
        if copy.resident:
            self._tiers.device.tier.unpin(copy.node.key)

    def _close(self, lease: KVLease) -> None:
        lease.closed = True
        self._keep_borrowed(lease, [])
        for copy in lease.pinned:
            self._unpin(copy)
        self.pool.release(lease.block_table)
        lease.pinned, lease.block_table = [], []
        del self._leases[id(lease)]

    def _check_fits(self, tokens: int) -> None:
        if self.shape.blocks_for(tokens) > self.pool.blocks:
            raise ValueError(
                f"{tokens} tokens need {self.shape.blocks_for(tokens)} blocks, but the device has {self.pool.blocks}: "
                "shorten the prompt, or enlarge the device's pool"
            )
