"""Where the nodes of the tree are, and how they move between device, host and disk (RAGCache section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import pairwise

from ragorder.kernels.cache.copies import Copies, Copy
from ragorder.kernels.cache.disk import DiskTier
from ragorder.kernels.cache.loading import Load
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import CachedNode, DeviceCopy, HostCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.paging import BlockPool, OutOfBlocksError

__all__ = ["Hierarchy"]


class Hierarchy:
    """The nodes in memory, by their keys, and the tiers that hold them.

    A node that leaves the device is copied to the host, once: while that copy lives, later ones cost nothing. What
    leaves the host is written to the disk, unless it is there or on the device, and so are those above it; what leaves
    the disk is gone. A host without room is passed over. Blocks are reused when the copies from them have ended, and
    not before.

    `failed` is told of a node that could not be loaded, which is not on the device any more.
    """

    def __init__(self, device: MemoryTier, host: MemoryTier, disk: DiskTier | None, copies: Copies) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.copies = copies
        self.nodes: dict[bytes, CachedNode] = {}
        self.loads: list[Load] = []
        self.failed: Callable[[DeviceCopy], None] = _nobody_cares

    def poll(self) -> None:
        """Hear of what has ended, and begin what waited for it."""
        self.copies.poll()
        if self.loads:
            for load in self.loads:
                load.advance(self.copies, self.host, self.device)
            ended = [load for load in self.loads if load.worked is not None]
            if ended:
                self.loads = [load for load in self.loads if load.worked is None]
                for load in ended:
                    self._arrive(load, bool(load.worked))
        if self.disk is not None:
            self.disk.poll()

    def settle(self) -> None:
        """Wait until nothing moves between device and host."""
        while self.loads or len(self.copies):
            for load in self.loads:
                load.wait()
            self.copies.wait()
            self.poll()

    def find(self, path: Sequence[Segment]) -> list[CachedNode]:
        """The longest prefix of the path that the tiers hold."""
        found: list[CachedNode] = []
        start, parent = 0, None
        for key, tokens in path:
            node = self.nodes.get(key)
            if node is None:
                if self.disk is None or key not in self.disk:
                    break
                node = CachedNode(key, parent, start, tokens)
            elif (node.start, node.tokens) != (start, tokens):
                break
            found.append(node)
            start, parent = start + tokens, key
        return found

    def bring(self, nodes: Sequence[CachedNode], protected: Container[bytes] = ()) -> list[DeviceCopy]:
        """Pin these nodes on the device, and begin to load those that are not there; only the first of them if the
        disk does not have one any more.

        Raises OutOfBlocksError, and pins and loads none, if there is no room without what is pinned and `protected`.
        """
        held: list[CachedNode] = []
        for node in nodes:
            if not self._hold(node):
                break
            held.append(node)
        missing = sum(len(self._covering(node)) for node in held if node.device is None)
        try:
            self.make_room(missing, protected)
        except OutOfBlocksError:
            for node in held:
                self._let_go(node)
            raise
        return [node.device or self._load(node) for node in held]

    def make_room(self, blocks: int, protected: Container[bytes] = ()) -> None:
        """Have so many blocks free on the device. Raises OutOfBlocksError, and changes nothing, if that cannot be."""
        if blocks <= self.device.pool.free_blocks:
            return
        for key in self.device.victims(blocks, protected):
            self._leave_device(self.nodes[key])
        self.copies.free(self.device.pool, blocks)

    def squeeze(self, keep: Iterable[DeviceCopy]) -> None:
        """Have the device hold nothing but what is pinned and these, each block once, root first."""
        kept = [copy for copy in keep if copy.here]
        for copy in kept:
            self.device.tier.pin(copy.node.key)
        self.settle()
        for key in self.device.emptied():
            self._leave_device(self.nodes[key])
        self.copies.wait()
        kept = [copy for copy in kept if copy.here]
        for parent, child in pairwise(kept):
            self.join(parent, child)
        for copy in kept:
            self.device.tier.unpin(copy.node.key)

    def add(
        self, segment: Segment, start: int, blocks: Sequence[int], parent: bytes | None, above: DeviceCopy | None
    ) -> DeviceCopy:
        """A node that is about to be computed in these blocks, behind `above`, which is its parent's copy."""
        node = self.nodes.get(segment.key)
        if node is None:
            node = self.nodes[segment.key] = CachedNode(segment.key, parent, start, segment.tokens)
        shares = above is not None and above.here and above.blocks[-1] == blocks[0]
        self.device.pool.retain(blocks)
        copy = DeviceCopy(node, list(blocks), shares=shares, certain=False)
        return self._enter(copy)

    def remove(self, copy: DeviceCopy) -> None:
        """The node's copy is not to be used by anybody else."""
        node = copy.node
        node.device = None
        self.device.remove(node.key, node.tokens)
        self.device.pool.release(copy.blocks)
        self._forget(node)

    def join(self, parent: DeviceCopy, child: DeviceCopy) -> None:
        """Have a node end in the block in which its child begins, if it has one of its own that nobody else uses: the
        child's contains the parent's last tokens, too, as they are on one path."""
        pool = self.device.pool
        own, common = parent.blocks[-1], child.blocks[0]
        if own == common or not child.node.start % pool.shape.block_size or not child.complete:
            return
        above = self._ending_in(own, parent)
        if pool.references(own) > len(above) or not all(copy.complete for copy in above):
            return
        for copy in above:
            pool.retain((common,))
            copy.blocks[-1] = common
            pool.release((own,))
        child.shares = True
        child.entry = self.device.resize(child.node.key, child.size)

    def copy_to_host(self, node: CachedNode) -> HostCopy | None:
        """Have a node that is on the device in the host as well: its copy there, or on its way; None without room."""
        if node.host is None and node.device is not None:
            self._to_host(node, node.device)
        return node.host

    def forget_device(self) -> None:
        """All that is on the device is lost: what is nowhere else is gone."""
        self.settle()
        for node in list(self.nodes.values()):
            if node.device is not None:
                self.remove(node.device)

    def clear(self) -> None:
        """Hold nothing any more, on no tier."""
        self.settle()
        for node in self.nodes.values():
            if node.device is not None:
                self.device.pool.release(node.device.blocks)
                node.device = None
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
        self.settle()
        if self.disk is not None:
            self.disk.close()
        self.copies.close()

    def _ending_in(self, block: int, copy: DeviceCopy) -> list[DeviceCopy]:
        """A copy and those above it that end in the same block."""
        found = [copy]
        while found[-1].shares and found[-1].blocks == [block]:
            parent = found[-1].node.parent
            node = self.nodes.get(parent) if parent is not None else None
            if node is None or node.device is None:
                break
            found.append(node.device)
        return found

    def _covering(self, node: CachedNode) -> range:
        return self.device.pool.shape.covering(node.start, node.tokens)

    def _hold(self, node: CachedNode) -> bool:
        """Keep the node where it would come from."""
        if node.device is not None:
            self.device.tier.pin(node.key)
        elif node.host is not None:
            self.host.tier.pin(node.key)
        else:
            return self.disk is not None and self.disk.hold(node.key)
        return True

    def _let_go(self, node: CachedNode) -> None:
        if node.device is not None:
            self.device.tier.unpin(node.key)
        elif node.host is not None:
            self.host.tier.unpin(node.key)
        elif self.disk is not None:
            self.disk.release(node.key)

    def _load(self, node: CachedNode) -> DeviceCopy:
        """Into blocks that are free. The node is held where it comes from, until it has arrived."""
        blocks = self.device.pool.allocate(len(self._covering(node)))
        copy = DeviceCopy(node, blocks, shares=False, certain=True)
        reading = None
        if node.host is not None:
            copy.origin = "host"
        elif self.disk is not None:
            copy.origin = "disk"
            reading = self.disk.read(node.key, len(blocks))
        self.nodes[node.key] = node
        self._enter(copy)
        # For whoever wants it, and for the way.
        self.device.tier.pin(node.key)
        self.device.tier.pin(node.key)
        copy.load = Load(copy, reading)
        copy.load.advance(self.copies, self.host, self.device)
        self.loads.append(copy.load)
        return copy

    def _enter(self, copy: DeviceCopy) -> DeviceCopy:
        node = copy.node
        known = node.host.entry if node.host is not None else None
        node.device = copy
        copy.entry = self.device.insert(node.key, copy.size, node.parent, node.tokens, known)
        return copy

    def _arrive(self, load: Load, worked: bool) -> None:
        copy, node = load.copy, load.copy.node
        copy.load = None
        self.device.tier.unpin(node.key)
        if load.reading is None:
            if node.host is not None:
                self.host.tier.unpin(node.key)
        elif self.disk is not None:
            self.disk.release(node.key)
        if worked:
            self.device.received += 1
            above = self.nodes.get(node.parent) if node.parent is not None else None
            if above is not None and above.device is not None:
                self.join(above.device, copy)
            return
        if load.reading is None:
            self.host.failed += 1
            if node.host is not None:
                self._drop_host(node, node.host)
        elif self.disk is not None:
            self.disk.failed += 1
        self.remove(copy)
        self.failed(copy)

    def _leave_device(self, node: CachedNode) -> None:
        """Its tier has given it up."""
        copy = node.device
        assert copy is not None
        node.device = None
        self.device.tokens -= node.tokens
        way = self._to_host(node, copy) or self._to_disk(node, copy) if node.host is None else node.host.arrival
        self._leave(node, self.device.pool, way)
        self.device.pool.release(copy.blocks)
        self._forget(node)

    def _to_host(self, node: CachedNode, copy: DeviceCopy) -> Copy | None:
        if not self._make_host_room(len(copy.blocks)):
            return None
        blocks = self.host.pool.allocate(len(copy.blocks))
        there = node.host = HostCopy(blocks)
        there.entry = self.host.insert(node.key, len(blocks), node.parent, node.tokens, copy.entry)
        self.host.tier.pin(node.key)
        then = partial(self._arrive_in_host, node, there)
        there.arrival = self.copies.start(self.device.pool, copy.blocks, self.host.pool, blocks, then)
        return there.arrival

    def _to_disk(self, node: CachedNode, copy: DeviceCopy | HostCopy) -> Copy | None:
        """And those above it: after a restart the disk is all there is, and a node is found behind its parent."""
        if self.disk is None:
            return None
        for above in reversed(self._not_on_disk(node.parent)):
            place = above.host if above.host is not None and above.host.arrival is None else above.device
            if place is not None and place.complete:
                self._write(above, place, self.disk)
        return self._write(node, copy, self.disk)

    def _write(self, node: CachedNode, copy: DeviceCopy | HostCopy, disk: DiskTier) -> Copy | None:
        pool = self.host.pool if isinstance(copy, HostCopy) else self.device.pool
        cost = copy.entry.cost if copy.entry is not None else 0.0
        return disk.write(node.key, node.parent, pool, copy.blocks, cost)

    def _not_on_disk(self, key: bytes | None) -> list[CachedNode]:
        """A node and those above it, up to the first that is there, or nowhere."""
        found: list[CachedNode] = []
        while key is not None and self.disk is not None and key not in self.disk and key in self.nodes:
            found.append(self.nodes[key])
            key = found[-1].parent
        return found

    def _leave(self, node: CachedNode, pool: BlockPool, way: Copy | None) -> None:
        """What copies hold of the node in this pool will be free once they have ended."""
        for copy in (way, self.disk.copying(node.key) if self.disk is not None else None):
            if copy is not None and copy.source is pool:
                copy.leaving = True

    def _arrive_in_host(self, node: CachedNode, there: HostCopy, worked: bool) -> None:
        there.arrival = None
        self.host.tier.unpin(node.key)
        if worked:
            self.host.received += 1
        else:
            self.device.failed += 1
            self._drop_host(node, there)
            self._forget(node)

    def _make_host_room(self, blocks: int) -> bool:
        host = self.host
        if blocks > host.pool.blocks:
            if host.pool.blocks:
                host.refuse("size")
            return False
        try:
            going = host.victims(blocks)
        except OutOfBlocksError:
            # What is on its way there cannot be given up before it has arrived.
            self.copies.wait()
            try:
                going = host.victims(blocks)
            except OutOfBlocksError:
                host.refuse("room")
                return False
        for key in going:
            self._leave_host(self.nodes[key])
        self.copies.free(host.pool, blocks)
        return True

    def _leave_host(self, node: CachedNode) -> None:
        """Its tier has given it up."""
        there = node.host
        assert there is not None
        node.host = None
        self.host.tokens -= node.tokens
        way = self._to_disk(node, there) if node.device is None else None
        self._leave(node, self.host.pool, way)
        self.host.pool.release(there.blocks)
        self._forget(node)

    def _drop_host(self, node: CachedNode, there: HostCopy) -> None:
        node.host = None
        self.host.remove(node.key, node.tokens)
        self.host.pool.release(there.blocks)

    def _forget(self, node: CachedNode) -> None:
        if node.device is None and node.host is None:
            self.nodes.pop(node.key, None)


def _nobody_cares(copy: DeviceCopy) -> None:
    """Before there are leases."""
