"""Movement of nodes between device, host and disk (RAGCache 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise

from ragorder.kernels.cache.copies import Copies, Copy
from ragorder.kernels.cache.disk import StoreTier
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import CachedNode, CopyLocation, CopyState, DeviceCopy, DeviceLoad, HostCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.paging import BlockPool, OutOfBlocksError
from ragorder.trie.policies import AwaitedNodes, Tier


class Hierarchy:
    """Nodes in memory by key, and their tiers. Evicted nodes move from device to host, and from there, with their
    ancestors, to disk. `on_load_failed` gets the GONE copy."""

    def __init__(
        self,
        device: MemoryTier,
        host: MemoryTier,
        disk: StoreTier | None,
        copies: Copies,
        on_load_failed: Callable[[DeviceCopy], None],
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.copies = copies
        self.nodes: dict[bytes, CachedNode] = {}
        self.loads: list[DeviceLoad] = []
        self.awaited = AwaitedNodes(host.pool.blocks * host.pool.shape.block_size // 2)
        self._on_load_failed = on_load_failed

    def poll(self) -> None:
        if self.disk is not None:
            # First, so that `copies.poll` also frees the blocks of finished writes.
            self.disk.poll()
        self.copies.poll()
        if self.loads:
            for load in self.loads:
                load.advance(self.copies, self.host, self.device)
            ended = [load for load in self.loads if load.succeeded is not None]
            if ended:
                self.loads = [load for load in self.loads if load.succeeded is None]
                for load in ended:
                    self._finish_load(load, bool(load.succeeded))

    def drain(self) -> None:
        while self.loads or len(self.copies):
            for load in self.loads:
                load.wait()
            self.copies.wait()
            self.poll()

    def match(self, path: Sequence[Segment]) -> list[CachedNode]:
        found: list[CachedNode] = []
        start, parent = 0, None
        for segment in path:
            node = self.find(CopyLocation(segment.key, parent, start, segment.tokens))
            if node is None:
                break
            found.append(node)
            start, parent = node.end, node.key
        return found

    def find(self, where: CopyLocation) -> CachedNode | None:
        node = self.nodes.get(where.key)
        if node is None:
            return CachedNode(*where) if self.disk is not None and where.key in self.disk else None
        return node if (node.start, node.tokens) == (where.start, where.tokens) else None

    def holds(self, key: bytes) -> bool:
        return key in self.nodes or (self.disk is not None and key in self.disk)

    def load(self, nodes: Sequence[CachedNode], protected: Container[bytes] = ()) -> list[DeviceCopy]:
        """Pin nodes on the device and load absent ones, up to one lost by the disk. Raises OutOfBlocksError, changing
        nothing."""
        pinned: list[tuple[Tier | StoreTier, CachedNode]] = []
        for node in nodes:
            source = self._source(node)
            if source is None or source.pin(node.key) is False:
                break
            pinned.append((source, node))
        missing = sum(len(self._covering(node)) for _, node in pinned if node.device is None)
        try:
            self.make_room(missing, protected)
            blocks = iter(self.device.pool.allocate(missing))
        except OutOfBlocksError:
            for source, node in pinned:
                source.unpin(node.key)
            raise
        return [node.device or self._begin_load(node, blocks) for _, node in pinned]

    def make_room(self, blocks: int, protected: Container[bytes] = ()) -> None:
        # Repeat if a node without its parent holds a block of an evicted node.
        while blocks > self.device.pool.free_blocks:
            for key in self.device.evict(blocks, protected):
                self._offload(self.nodes[key])
            self.copies.free(self.device.pool, blocks)

    def compact(self, keep: Iterable[DeviceCopy]) -> None:
        """Evict all but pinned nodes and `keep` (root first), and merge their duplicate blocks."""
        kept = [copy for copy in keep if copy.resident]
        for copy in kept:
            self.device.tier.pin(copy.node.key)
        self.drain()
        for key in self.device.evict_unpinned():
            self._offload(self.nodes[key])
        self.copies.wait()
        kept = [copy for copy in kept if copy.resident]
        for parent, child in pairwise(kept):
            self._merge_boundary(parent, child)
        for copy in kept:
            self.device.tier.unpin(copy.node.key)

    def insert(
        self,
        segment: Segment,
        start: int,
        blocks: Sequence[int],
        parent: bytes | None,
        above: Iterable[DeviceCopy] = (),
    ) -> DeviceCopy:
        """Insert a PENDING node; its ancestors' copies `above` may end in its first block."""
        node = self.nodes.get(segment.key)
        if node is None:
            node = self.nodes[segment.key] = CachedNode(segment.key, parent, start, segment.tokens)
        shares = any(copy.resident and copy.blocks[-1] == blocks[0] for copy in above)
        self.device.pool.retain(blocks)
        return self._enter(DeviceCopy(node, list(blocks), CopyState.PENDING, shares_first=shares))

    def remove(self, copy: DeviceCopy) -> None:
        node = copy.node
        self._detach(copy)
        self.device.remove(node.key, node.tokens)
        self.device.pool.release(copy.blocks)
        self._forget(node)

    def drop(self, node: CachedNode) -> DeviceCopy | None:
        """Remove a node from device and host, while it is not copied. Return the device's copy."""
        copy = node.device
        if node.host is not None:
            self._drop_host(node, node.host)
        if copy is not None:
            self.remove(copy)
        self._forget(node)
        return copy

    def copy_to_host(self, node: CachedNode) -> HostCopy | None:
        if node.host is None and node.device is not None:
            self._to_host(node, node.device)
        return node.host

    def forget_device(self) -> None:
        # Copies that ran while the device failed may hold anything.
        self.copies.distrust(self.device.pool)
        if self.disk is not None:
            self.disk.discard_distrusted()
        self.drain()
        # An interrupted eviction may have taken the node from the tier, but not from the tree.
        for node in list(self.nodes.values()):
            if node.device is not None:
                self._detach(node.device)
            if node.key in self.device.tier:
                self.device.tier.remove(node.key)
            self._forget(node)
        self.device.tokens = 0
        self.device.pool.clear()

    def clear(self) -> None:
        self.drain()
        for node in self.nodes.values():
            if node.device is not None:
                self.device.pool.release(node.device.blocks)
                self._detach(node.device)
            if node.host is not None:
                self.host.pool.release(node.host.blocks)
                node.host = None
        self.nodes.clear()
        for tier in (self.device, self.host):
            tier.tier.clear()
            tier.tokens = 0
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        # The disk's folder is released even if the device is lost.
        with ExitStack() as closing:
            for tier in (self.device, self.host):
                closing.callback(tier.pool.close)
            closing.callback(self.copies.close)
            if self.disk is not None:
                closing.callback(self.disk.close)
            self.drain()

    def _merge_boundary(self, parent: DeviceCopy, child: DeviceCopy) -> None:
        # Free the parent's last block if only the parent uses it: the child's first block has the parent's tokens too.
        pool = self.device.pool
        own, common = parent.blocks[-1], child.blocks[0]
        if own == common or not child.node.start % pool.shape.block_size or not child.ready:
            return
        if child.node.parent != parent.node.key:
            # Without the nodes between them, these blocks cover other positions.
            return
        enders = self._ending_in(own, parent)
        if pool.references(own) > len(enders) or not all(copy.ready for copy in enders):
            return
        for copy in enders:
            pool.retain((common,))
            copy.blocks[-1] = common
            pool.release((own,))
        child.shares_first = True
        child.entry = self.device.resize(child.node.key, child.size)

    def _ending_in(self, block: int, copy: DeviceCopy) -> list[DeviceCopy]:
        found = [copy]
        while found[-1].shares_first and found[-1].blocks == [block]:
            parent = found[-1].node.parent
            node = self.nodes.get(parent) if parent is not None else None
            if node is None or node.device is None or node.device.blocks[-1] != block:
                break
            found.append(node.device)
        return found

    def _covering(self, node: CachedNode) -> range:
        return self.device.pool.shape.covering(node.start, node.tokens)

    def _source(self, node: CachedNode) -> Tier | StoreTier | None:
        if node.device is not None:
            return self.device.tier
        return self.disk if node.host is None else self.host.tier

    def _begin_load(self, node: CachedNode, free: Iterator[int]) -> DeviceCopy:
        blocks = list(islice(free, len(self._covering(node))))
        copy = DeviceCopy(node, blocks, CopyState.LOADING)
        reading = None
        if node.host is not None:
            copy.origin = "host"
        elif self.disk is not None:
            copy.origin = "disk"
            reading = self.disk.read(node.key, len(blocks))
        self.nodes[node.key] = node
        self._enter(copy)
        # One pin for the caller, one for the load, which may end later.
        self.device.tier.pin(node.key)
        self.device.tier.pin(node.key)
        copy.load = DeviceLoad(copy, reading)
        copy.load.advance(self.copies, self.host, self.device)
        self.loads.append(copy.load)
        return copy

    def _enter(self, copy: DeviceCopy) -> DeviceCopy:
        node = copy.node
        known = node.host.entry if node.host is not None else None
        node.device = copy
        copy.entry = self.device.insert(node.key, copy.size, node.parent, node.tokens, known)
        return copy

    def _detach(self, copy: DeviceCopy) -> None:
        copy.node.device = None
        copy.state = CopyState.GONE

    def _finish_load(self, load: DeviceLoad, succeeded: bool) -> None:
        copy, node = load.copy, load.copy.node
        copy.load = None
        self.device.tier.unpin(node.key)
        if load.reading is None:
            if node.host is not None:
                self.host.tier.unpin(node.key)
        elif self.disk is not None:
            self.disk.unpin(node.key)
        if succeeded:
            copy.state = CopyState.READY
            self.device.received += 1
            parent = self.nodes.get(node.parent) if node.parent is not None else None
            if parent is not None and parent.device is not None:
                self._merge_boundary(parent.device, copy)
            return
        if load.reading is None:
            self.host.failed += 1
            if node.host is not None:
                self._drop_host(node, node.host)
        elif self.disk is not None:
            self.disk.failed += 1
        self.remove(copy)
        self._on_load_failed(copy)

    def _offload(self, node: CachedNode) -> None:
        copy = node.device
        assert copy is not None
        self._detach(copy)
        self.device.tokens -= node.tokens
        moving = self._to_host(node, copy) or self._to_disk(node, copy) if node.host is None else node.host.arrival
        self._mark_leaving(node, self.device.pool, moving)
        self.device.pool.release(copy.blocks)
        self._forget(node)

    def _to_host(self, node: CachedNode, copy: DeviceCopy) -> Copy | None:
        if not self.make_host_room(len(copy.blocks)):
            return None
        blocks = self.host.pool.allocate(len(copy.blocks))
        there = node.host = HostCopy(blocks)
        there.entry = self.host.insert(node.key, len(blocks), node.parent, node.tokens, copy.entry)
        self.host.tier.pin(node.key)
        then = partial(self._finish_offload, node, there)
        there.arrival = self.copies.start(self.device.pool, copy.blocks, self.host.pool, blocks, then)
        return there.arrival

    def _to_disk(self, node: CachedNode, copy: DeviceCopy | HostCopy) -> Copy | None:
        # With its ancestors: after a restart, nodes are found through their parents.
        if self.disk is None:
            return None
        for above in reversed(self._not_on_disk(node.parent)):
            source = above.host if above.host is not None and above.host.ready else above.device
            if source is not None and source.ready:
                self._write(above, source, self.disk)
        return self._write(node, copy, self.disk)

    def _write(self, node: CachedNode, copy: DeviceCopy | HostCopy, disk: StoreTier) -> Copy | None:
        pool = self.host.pool if isinstance(copy, HostCopy) else self.device.pool
        cost = copy.entry.cost if copy.entry is not None else 0.0
        return disk.write(node.key, node.parent, pool, copy.blocks, cost)

    def _not_on_disk(self, key: bytes | None) -> list[CachedNode]:
        found: list[CachedNode] = []
        while key is not None and self.disk is not None and key not in self.disk and key in self.nodes:
            found.append(self.nodes[key])
            key = found[-1].parent
        return found

    def _mark_leaving(self, node: CachedNode, pool: BlockPool, moving: Copy | None) -> None:
        # Only the node's copies out of this pool now hold its blocks.
        for copy in (moving, self.disk.copying(node.key) if self.disk is not None else None):
            if copy is not None and copy.source is pool:
                copy.leaving = True

    def _finish_offload(self, node: CachedNode, there: HostCopy, succeeded: bool) -> None:
        there.arrival = None
        self.host.tier.unpin(node.key)
        if succeeded:
            self.host.received += 1
        else:
            self.device.failed += 1
            self._drop_host(node, there)
            self._forget(node)

    def make_host_room(self, blocks: int) -> bool:
        host = self.host
        if blocks > host.pool.blocks:
            if host.pool.blocks:
                host.refused["size"] += 1
            return False
        try:
            evicted = self._evict_host(blocks)
        except OutOfBlocksError:
            # Copies into the host are pinned until they end.
            self.copies.wait()
            try:
                evicted = self._evict_host(blocks)
            except OutOfBlocksError:
                host.refused["room"] += 1
                return False
        for key in evicted:
            self._leave_host(self.nodes[key])
        self.copies.free(host.pool, blocks)
        return True

    def _evict_host(self, blocks: int) -> list[bytes]:
        try:
            return self.host.evict(blocks, self.awaited)
        except OutOfBlocksError:
            return self.host.evict(blocks)

    def _leave_host(self, node: CachedNode) -> None:
        there = node.host
        assert there is not None
        node.host = None
        self.host.tokens -= node.tokens
        moving = self._to_disk(node, there) if node.device is None else None
        self._mark_leaving(node, self.host.pool, moving)
        self.host.pool.release(there.blocks)
        self._forget(node)

    def _drop_host(self, node: CachedNode, there: HostCopy) -> None:
        node.host = None
        self.host.remove(node.key, node.tokens)
        self.host.pool.release(there.blocks)

    def _forget(self, node: CachedNode) -> None:
        if node.device is None and node.host is None:
            self.nodes.pop(node.key, None)
