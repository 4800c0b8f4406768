"""Nodes of the knowledge tree, and states of their copies."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ragorder.kernels.cache.copies import Copies, Copy
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.paging import BlockPool
from ragorder.trie.policies import TierNode

_logger = logging.getLogger("ragorder.kernels")


class CopyState(Enum):
    """PENDING: the running step writes it, later steps may read it. GONE: out of the tree; leases may hold its
    blocks."""

    PENDING = auto()
    LOADING = auto()
    READY = auto()
    GONE = auto()


class CopyLocation(NamedTuple):
    """`tokens` tokens of KV at position `start`, directly after the node `parent`."""

    key: bytes
    parent: bytes | None
    start: int
    tokens: int


@dataclass(slots=True, eq=False, repr=False)
class CachedNode:
    key: bytes
    parent: bytes | None
    start: int
    tokens: int
    device: DeviceCopy | None = None
    host: HostCopy | None = None

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(slots=True, eq=False, repr=False)
class DeviceCopy:
    """The first and last of the `blocks` may also hold neighbours' tokens. `shares_first`: the first counts for an
    ancestor. `origin`: the tier it was loaded from. `prefetched`: not used yet."""

    node: CachedNode
    blocks: list[int]
    state: CopyState
    shares_first: bool = False
    load: DeviceLoad | None = None
    origin: str = "device"
    prefetched: bool = False
    entry: TierNode | None = None

    @property
    def size(self) -> int:
        return len(self.blocks) - self.shares_first

    @property
    def resident(self) -> bool:
        return self.state is not CopyState.GONE

    @property
    def ready(self) -> bool:
        return self.state is CopyState.READY


@dataclass(slots=True, eq=False, repr=False)
class HostCopy:
    """KV in the host's blocks; `arrival`: the running copy into them."""

    blocks: list[int]
    arrival: Copy | None = None
    entry: TierNode | None = None

    @property
    def ready(self) -> bool:
        return self.arrival is None


class DeviceLoad:
    """A load from host, or from disk by `reading`. `succeeded` is None until it ends."""

    def __init__(self, copy: DeviceCopy, reading: Future[BlockPool | None] | None) -> None:
        self.copy = copy
        self.succeeded: bool | None = None
        self.reading = reading
        self._copying: Copy | None = None

    def advance(self, copies: Copies, host: MemoryTier, device: MemoryTier) -> None:
        if self._copying is not None or self.succeeded is not None:
            return
        if self.reading is None:
            source = self.copy.node.host
            if source is None:
                self.succeeded = False
            elif source.ready:
                self._begin(copies, host.pool, source.blocks, device)
        elif self.reading.done():
            staged = self._read(self.reading)
            if staged is None:
                self.succeeded = False
            else:
                self._begin(copies, staged, range(staged.blocks), device)

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.transfer.wait()
        elif self.reading is not None:
            # `advance` logs an error.
            self.reading.exception()
        elif (source := self.copy.node.host) is not None and source.arrival is not None:
            source.arrival.transfer.wait()

    def _begin(self, copies: Copies, source: BlockPool, blocks: range | list[int], device: MemoryTier) -> None:
        self._copying = copies.start(source, blocks, device.pool, self.copy.blocks, self._end)

    def _end(self, succeeded: bool) -> None:
        self.succeeded = succeeded

    def _read(self, reading: Future[BlockPool | None]) -> BlockPool | None:
        try:
            return reading.result()
        except Exception as error:
            _logger.error("reading a node from the disk failed: %s", type(error).__name__)
            return None
