"""Nodes on their way to the device."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from ragorder.kernels.cache.copies import Copies, Copy
from ragorder.kernels.cache.memory import MemoryTier
from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.paging import BlockPool

__all__ = ["Load"]

_logger = logging.getLogger("ragorder.kernels")


class Load:
    """One node's way: out of the host's pool, or from the disk through memory of its own. `reading` is the disk's part
    of it, None if it comes from the host. `worked` is None until it has ended."""

    def __init__(self, copy: DeviceCopy, reading: Future[BlockPool | None] | None) -> None:
        self.copy = copy
        self.worked: bool | None = None
        self.reading = reading
        self._copying: Copy | None = None

    def advance(self, copies: Copies, host: MemoryTier, device: MemoryTier) -> None:
        """Begin the next part of the way if the one before has ended."""
        if self._copying is not None or self.worked is not None:
            return
        if self.reading is None:
            there = self.copy.node.host
            if there is None:
                # What was to bring it into the host has failed.
                self.worked = False
            elif there.arrival is None:
                self._begin(copies, host.pool, there.blocks, device)
        elif self.reading.done():
            staged = self._read(self.reading)
            if staged is None:
                self.worked = False
            else:
                self._begin(copies, staged, range(staged.blocks), device)

    def wait(self) -> None:
        """Until the part under way has ended."""
        if self._copying is not None:
            self._copying.transfer.wait()
        elif self.reading is not None:
            self._read(self.reading)
        elif (there := self.copy.node.host) is not None and there.arrival is not None:
            there.arrival.transfer.wait()

    def _begin(self, copies: Copies, source: BlockPool, blocks: range | list[int], device: MemoryTier) -> None:
        self._copying = copies.start(source, blocks, device.pool, self.copy.blocks, self._end)

    def _end(self, worked: bool) -> None:
        self.worked = worked

    def _read(self, reading: Future[BlockPool | None]) -> BlockPool | None:
        try:
            return reading.result()
        except Exception as error:
            _logger.error("a node could not be read: %s", type(error).__name__)
            return None
