"""Disk tier: nodes evicted from the host, kept over restarts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ragorder.kernels.cache.copies import Copies, Copy
from ragorder.kernels.cache.stats import CacheTierStats
from ragorder.kernels.paging import BlockPool, KVShape
from ragorder.kernels.store import ChunkStore, StoreRefusedError
from ragorder.kernels.store.format import is_variant, variant_content

_logger = logging.getLogger("ragorder.kernels")

_LAYOUT = "blocks of (layers, keys and values, tokens, heads, numbers), version 1"


def store_identity(identity: str, shape: KVShape) -> str:
    return f"{identity}\n{shape}\n{_LAYOUT}"


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """`bytes` in the folder `path`, for one process. Nodes to write beyond `backlog_bytes` of memory are dropped.
    Raises ValueError."""

    path: Path
    bytes: int
    io_threads: int = 2
    backlog_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.backlog_bytes < 0 or self.io_threads < 1:
            raise ValueError("give 0 or more bytes and backlog_bytes, and 1 or more io_threads")


@dataclass(slots=True, eq=False, repr=False)
class _Write:
    blocks: BlockPool
    copy: Copy
    future: Future[bool] | None = None


class StoreTier:
    """Nodes in a `ChunkStore`. Writes never block: nodes wait in a readable backlog. If the store cannot be opened,
    this is logged and counted, and the tier stays empty."""

    def __init__(
        self,
        settings: DiskSettings,
        shape: KVShape,
        identity: str,
        copies: Copies,
        *,
        policy: str,
        history: int,
        pinned: bool,
        executor: Executor | None = None,
    ) -> None:
        self.received = self.failed = self.hit_tokens = 0
        self._settings = settings
        self._shape = shape
        self._identity = store_identity(identity, shape)
        self._copies = copies
        self._policy = policy
        self._history = history
        self._pinned = pinned
        self._backlog: dict[bytes, _Write] = {}
        self._backlog_bytes = 0
        self._refused: Counter[str] = Counter()
        self._variants: dict[bytes, bytes] = {}
        self._store = self._open(settings.bytes)
        self._readers = executor or ThreadPoolExecutor(settings.io_threads, "ragorder-disk-read")
        self._writer = executor or ThreadPoolExecutor(1, "ragorder-disk-write")

    def __contains__(self, key: bytes) -> bool:
        return key in self._backlog or (self._store is not None and key in self._store)

    def variant(self, content: bytes) -> bytes | None:
        key = self._variants.get(content)
        return key if key is not None and key in self else None

    def pin(self, key: bytes) -> bool:
        if self._store is None:
            return False
        self._store.pin((key,))
        if key in self:
            return True
        self._store.unpin((key,))
        return False

    def unpin(self, key: bytes) -> None:
        if self._store is not None:
            self._store.unpin((key,))

    def use(
        self, path: Sequence[bytes], cost: float, computed: Container[bytes], expected: Mapping[bytes, float]
    ) -> None:
        if self._store is not None:
            self._store.use(path, cost=cost, computed=computed, expected=expected)

    def write(
        self, key: bytes, parent: bytes | None, source: BlockPool, blocks: Sequence[int], cost: float
    ) -> Copy | None:
        store = self._store
        if store is None or key in self:
            return None
        size = len(blocks) * self._shape.block_bytes
        if store.pausing:
            self._refused["paused"] += 1
            return None
        if self._backlog_bytes + size > self._settings.backlog_bytes:
            self._refused["backlog"] += 1
            return None
        try:
            staged = BlockPool(self._shape, len(blocks), pinned=self._pinned)
        except MemoryError:
            # Without memory only this node is lost.
            self._refused["memory"] += 1
            return None
        write = _Write(staged, self._copies.start(source, blocks, staged, staged.allocate(len(blocks))))
        # Without a history the store knows no earlier use.
        used = not self._history

        def job() -> bool:
            write.copy.transfer.wait()
            return not write.copy.failed and store.write(key, memoryview(staged.rows()), parent, cost=cost, used=used)

        try:
            write.future = self._writer.submit(job)
        except RuntimeError:
            # No thread could be started.
            self._refused["memory"] += 1
            return write.copy
        self._backlog[key] = write
        self._backlog_bytes += size
        return write.copy

    def copying(self, key: bytes) -> Copy | None:
        write = self._backlog.get(key)
        return write.copy if write is not None else None

    def discard_distrusted(self) -> None:
        for key in [key for key, write in self._backlog.items() if write.copy.distrusted]:
            future = self._backlog[key].future
            if future is not None and _written(future) and self._store is not None:
                self._store.remove(key)

    def parents(self) -> dict[bytes, bytes | None]:
        return {} if self._store is None else self._store.parents()

    def remove(self, key: bytes) -> None:
        if self._store is not None:
            self._store.remove(key)

    def read(self, key: bytes, blocks: int) -> Future[BlockPool | None]:
        waiting = self._backlog.get(key)
        try:
            if waiting is not None:
                return self._readers.submit(_read_backlog, waiting, blocks)
            return self._readers.submit(self._read_store, key, blocks)
        except RuntimeError:
            # No thread could be started.
            unread: Future[BlockPool | None] = Future()
            unread.set_result(None)
            return unread

    def poll(self) -> None:
        if not self._backlog:
            return
        for key, write in list(self._backlog.items()):
            if write.future is not None and write.future.done():
                del self._backlog[key]
                self._backlog_bytes -= write.blocks.capacity_bytes
                self.received += _written(write.future)

    def wait(self) -> None:
        while self._backlog:
            for write in list(self._backlog.values()):
                if write.future is not None:
                    write.future.exception()
            self._copies.poll()
            self.poll()

    def clear(self) -> None:
        self.wait()
        if self._store is None:
            return
        self._store.close()
        # A store of capacity 0 removes every chunk it finds.
        emptied = self._open(0)
        if emptied is not None:
            emptied.close()
        self._store = self._open(self._settings.bytes)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._readers.shutdown()
            self._writer.shutdown()
            if self._store is not None:
                self._store.close()

    def stats(self) -> CacheTierStats:
        store = self._store
        refused = Counter(self._refused.copy())
        if store is None:
            return CacheTierStats(tokens=None, failed=self.failed, hit_tokens=self.hit_tokens, refused=dict(refused))
        refused.update(store.counters.refusals())
        used = store.used_bytes
        return CacheTierStats(
            nodes=len(store),
            tokens=None,
            bytes=used,
            used_bytes=used,
            capacity_bytes=store.capacity_bytes,
            hit_tokens=self.hit_tokens,
            received=self.received,
            evicted=store.counters.evicted,
            failed=self.failed,
            refused=dict(refused),
        )

    def _open(self, bytes: int) -> ChunkStore | None:
        try:
            store = ChunkStore(
                Path(self._settings.path),
                bytes,
                self._identity,
                policy=self._policy,
                history=self._history,
                logger=_logger,
            )
        except StoreRefusedError as refused:
            self._refused[refused.reason] += 1
            _logger.warning("no disk tier: %s; continuing with device and host only", refused)
            return None
        self._variants = {variant_content(key): key for key in store if is_variant(key)}
        return store

    def _read_store(self, key: bytes, blocks: int) -> BlockPool | None:
        staged = BlockPool(self._shape, blocks, pinned=self._pinned)
        staged.allocate(blocks)
        store = self._store
        return staged if store is not None and store.read(key, memoryview(staged.rows())) else None


def _read_backlog(waiting: _Write, blocks: int) -> BlockPool | None:
    if waiting.blocks.blocks != blocks:
        return None
    waiting.copy.transfer.wait()
    return None if waiting.copy.failed else waiting.blocks


def _written(future: Future[bool]) -> bool:
    try:
        return future.result()
    except Exception as error:
        _logger.error("writing a node to the disk failed: %s", type(error).__name__)
        return False
