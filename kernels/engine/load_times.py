"""Load times of the embedded engine's tiers, measured before it serves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ragorder.kernels.paging import BlockPool, KVShape, make_transfers
from ragorder.kernels.short_profile import LoadTimes
from ragorder.kernels.store import ChunkStore, StoreRefusedError

__all__ = ["blocks_of_a_load", "tier_loads"]

_TOKENS = 1_024
_BYTES = 64 << 20
_KEY = b"load"


def blocks_of_a_load(shape: KVShape, longest_tokens: int) -> int:
    """Those of a few documents."""
    return max(1, min(shape.blocks_for(min(longest_tokens, _TOKENS)), _BYTES // shape.block_bytes))


@contextmanager
def tier_loads(shape: KVShape, blocks: int, device: torch.device, disk: Path | None) -> Iterator[LoadTimes]:
    """Loads of `blocks` blocks as the cache makes them, between pools of their own. Those from disk, through a
    temporary folder in `disk` or next to it, find nothing of their file in memory; they raise OSError."""
    pinned = device.type == "cuda"
    on_device, host = BlockPool(shape, blocks, device), BlockPool(shape, blocks, pinned=pinned)
    # Pages that were never written take no time to read.
    host.kv.fill_(1)
    places = range(blocks)
    with ExitStack() as stack:
        transfers = make_transfers(device)
        stack.callback(transfers.close)
        stored: list[_StoredChunk] = []

        def from_host() -> float:
            before_s = time.perf_counter()
            transfers.start(host, places, on_device, places).wait()
            return time.perf_counter() - before_s

        def from_disk() -> float:
            assert disk is not None
            if not stored:
                stored.append(stack.enter_context(_stored_chunk(disk, host)))
            stored[0].forget_pages()
            before_s = time.perf_counter()
            staged = BlockPool(shape, blocks, pinned=pinned)
            stored[0].read(staged)
            transfers.start(staged, places, on_device, places).wait()
            return time.perf_counter() - before_s

        yield {"host": from_host} if disk is None else {"host": from_host, "disk": from_disk}


class _StoredChunk:
    def __init__(self, folder: Path, store: ChunkStore) -> None:
        self._folder = folder
        self._store = store

    def forget_pages(self) -> None:
        """As though the file had been written long ago."""
        for path in self._folder.rglob("*"):
            if path.is_file() and hasattr(os, "posix_fadvise"):
                with path.open("rb") as file:
                    # Only clean pages are dropped.
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, into: BlockPool) -> None:
        if not self._store.read(_KEY, memoryview(into.rows())):
            raise OSError("what was written cannot be read")


@contextmanager
def _stored_chunk(disk: Path, content: BlockPool) -> Iterator[_StoredChunk]:
    beside = next(folder for folder in (disk, *disk.parents) if folder.is_dir())
    with TemporaryDirectory(prefix=".ragorder-", dir=beside) as name:
        folder = Path(name)
        try:
            store = ChunkStore(folder, 2 * content.capacity_bytes + (1 << 20), "load times")
        except StoreRefusedError as refused:
            raise OSError(str(refused)) from refused
        with closing(store):
            if not store.write(_KEY, memoryview(content.rows())):
                raise OSError("the disk takes no chunk")
            yield _StoredChunk(folder, store)
