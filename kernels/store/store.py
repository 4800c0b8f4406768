"""Bounded store of chunks in a folder."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from ragorder.common.circuit_breaker import CircuitBreaker
from ragorder.kernels.store.folder import ChunkFolder, StoreRefusedError
from ragorder.kernels.store.format import MAX_KEY_BYTES, BadHeaderError, ChunkName, Header, checksum
from ragorder.kernels.store.scan import StoreCounters, check, scan
from ragorder.trie.policies import History, Tier, TierNode, make_policy
from ragorder.trie.policies.tier import NO_FORECAST


class StoredChunk:
    __slots__ = ("bytes_on_disk", "header_bytes", "name", "payload_bytes", "written")

    def __init__(self, name: ChunkName, header: Header, bytes_on_disk: int, written: float) -> None:
        self.name = name
        self.header_bytes = header.header_bytes
        self.payload_bytes = header.payload_bytes
        self.bytes_on_disk = bytes_on_disk
        self.written = written


class ChunkIndex:
    """Chunks by key, oldest write first. `other_bytes`: of files being written or removed, or unusable."""

    def __init__(self, capacity_bytes: int, policy: str, history: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.chunks: dict[bytes, StoredChunk] = {}
        self.tier = Tier(make_policy(policy), History(history) if history else None)
        self.other_bytes = 0
        self._pins: dict[bytes, int] = {}

    @property
    def used_bytes(self) -> int:
        return self.tier.used + self.other_bytes

    def restore(self, key: bytes, chunk: StoredChunk, parent: bytes | None, cost: float) -> None:
        known = TierNode(key)
        known.frequency, known.misses, known.cost = 1, 1, cost
        self.chunks[key] = chunk
        self.tier.insert(key, chunk.bytes_on_disk, parent, known=known)

    def insert(self, key: bytes, chunk: StoredChunk, parent: bytes | None) -> None:
        # `make_room` has reserved its room.
        self.other_bytes -= chunk.bytes_on_disk
        self.chunks[key] = chunk
        self.tier.insert(key, chunk.bytes_on_disk, parent)

    def remove(self, key: bytes) -> StoredChunk:
        # Its file still counts.
        chunk = self.chunks.pop(key)
        self.tier.remove(key)
        self.other_bytes += chunk.bytes_on_disk
        return chunk

    def parents(self) -> dict[bytes, bytes | None]:
        nodes = ((key, self.tier.get(key)) for key in self.chunks)
        return {key: cast("bytes | None", node.parent) for key, node in nodes if node is not None}

    def make_room(self, bytes_on_disk: int, protected: Container[bytes] = ()) -> dict[bytes, StoredChunk] | None:
        """Evict for a new file, or evict nothing and return None. `other_bytes` grows by the larger size: remove
        evicted files before writing."""
        if self.other_bytes + bytes_on_disk > self.capacity_bytes:
            return None
        missing = self.used_bytes + bytes_on_disk - self.capacity_bytes
        keys = self._evict(missing, protected) if missing > 0 else []
        if keys is None:
            return None
        evicted = {key: self.chunks.pop(key) for key in keys}
        self.other_bytes += max(bytes_on_disk, sum(chunk.bytes_on_disk for chunk in evicted.values()))
        return evicted

    def evict(self, bytes_on_disk: int, protected: Container[bytes] = ()) -> dict[bytes, StoredChunk]:
        """Evict at least `bytes_on_disk`, or nothing. Files count in `other_bytes` until removed."""
        evicted = {key: self.chunks.pop(key) for key in self._evict(bytes_on_disk, protected) or ()}
        self.other_bytes += sum(chunk.bytes_on_disk for chunk in evicted.values())
        return evicted

    def shrink(self) -> dict[bytes, StoredChunk]:
        return self.evict(min(self.used_bytes - self.capacity_bytes, self.tier.used))

    def pin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            left = self._pins.pop(key, 0) - 1
            if left > 0:
                self._pins[key] = left

    def clear(self) -> None:
        self.chunks = {}
        self.tier.clear()
        self.other_bytes = 0

    def _evict(self, bytes_on_disk: int, protected: Container[bytes]) -> list[bytes] | None:
        return cast("list[bytes] | None", self.tier.evict(bytes_on_disk, protected, self._pins))


_logger = logging.getLogger("ragorder")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors of a read that say nothing about the file.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ChunkStore:
    """Chunks of bytes by key (1 to 1024 bytes) in a folder of at most `capacity_bytes`, in whole blocks. Thread-safe.

        with closing(ChunkStore(folder, 1 << 30, "model, weights, layout")) as store:
            store.write(b"key", data)
            store.read(b"key", buffer)  # True: the buffer has the data

    Under one `identity` equal keys mean equal bytes. Chunks survive even a killed process, and count as used once.
    Reads verify header, key, identity and payload. One process has the folder; another waits up to `patience_s`.

    `read`, `write` and `use` count disk errors and never raise them. A full store evicts by `policy`, children first;
    after failures writing pauses. `removed` gets evicted and removed keys, on any thread. Raises StoreRefusedError.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        identity: str,
        *,
        policy: str = "pgdsf",
        history: int = 0,
        breaker: CircuitBreaker | None = None,
        removed: Callable[[Sequence[bytes]], None] | None = None,
        patience_s: float = 2.0,
        logger: logging.Logger = _logger,
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}: give 0 or more")
        self.counters = StoreCounters()
        self._index = ChunkIndex(capacity_bytes, policy, history)
        self._breaker = breaker or CircuitBreaker(failures=3, first_s=5.0, longest_s=300.0)
        self._removed = removed
        self._logger = logger
        self._writing: set[bytes] = set()
        self._busy = 0
        self._closed = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._folder = ChunkFolder(folder, identity, patience_s)
        try:
            self._serial = self._restore()
        except OSError as error:
            self._folder.close()
            raise StoreRefusedError.because_of(error, folder) from error

    def __len__(self) -> int:
        return len(self._index.chunks)

    def __iter__(self) -> Iterator[bytes]:
        with self._lock:
            return iter(list(self._index.chunks))

    def __contains__(self, key: object) -> bool:
        return key in self._index.chunks

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._index.used_bytes

    @property
    def oldest_written(self) -> float | None:
        with self._lock:
            return next((chunk.written for chunk in self._index.chunks.values()), None)

    @property
    def pausing(self) -> bool:
        with self._lock:
            return self._breaker.left_s > 0

    def read(self, key: bytes, into: bytearray | memoryview) -> bool:
        """Copy a chunk into a buffer of its size. After False the buffer may hold anything."""
        with self._lock:
            chunk = self._index.chunks.get(key)
            if chunk is None:
                self.counters.misses += 1
                return False
            self._busy += 1
        failed: OSError | BadHeaderError | None = None
        try:
            try:
                self._fill(key, chunk, into)
            except (OSError, BadHeaderError) as error:
                failed = error
            if self._after_reading(key, chunk, failed):
                self._remove_files([chunk])
                self._tell([key])
        finally:
            self._leave()
        return failed is None

    def write(
        self,
        key: bytes,
        data: bytes | bytearray | memoryview,
        parent: bytes | None = None,
        *,
        cost: float | None = None,
        used: bool = True,
        expected: Mapping[bytes, float] = NO_FORECAST,
        protected: Container[bytes] = (),
    ) -> bool:
        """Store a copy, evicting no `protected` key. Return whether the store has it now. `cost`: seconds per new
        token. Raises ValueError for invalid keys or costs."""
        if not 0 < len(key) <= MAX_KEY_BYTES or (parent is not None and not 0 < len(parent) <= MAX_KEY_BYTES):
            raise ValueError(f"keys and parents must have 1 to {MAX_KEY_BYTES} bytes")
        if cost is not None and not 0 <= cost < math.inf:
            raise ValueError(f"cost is {cost} s a token: give a finite number, 0 or more")
        if parent == key:
            raise ValueError("a chunk cannot be its own parent")
        with memoryview(data).cast("B") as payload:
            folder, index = self._folder, self._index
            header = Header(key, parent, len(payload), cost or 0.0, folder.identity, b"")
            size = folder.size_on_disk(header.file_bytes)
            with self._lock:
                if key in index.chunks:
                    return True
                evicted = self._reserve(key, size, protected)
                if evicted is None:
                    self._count_use(key, cost, used, expected)
                    return False
                name = ChunkName.of(key, self._serial)
                self._serial += 1
            failed: OSError | None = None
            try:
                try:
                    self._remove_evicted(evicted, size)
                    self._put(name, header._replace(payload_checksum=checksum(payload)), payload, protected)
                except OSError as error:
                    failed = error
                with self._lock:
                    if failed is None:
                        index.insert(key, StoredChunk(name, header, size, time.time()), parent)
                    else:
                        index.other_bytes -= size
                    self._count_use(key, cost, used, expected)
                    self._count_write(failed)
            finally:
                self._leave(key)
            return failed is None

    def use(
        self,
        path: Sequence[bytes],
        *,
        cost: float | None = None,
        computed: Container[bytes] = (),
        expected: Mapping[bytes, float] = NO_FORECAST,
    ) -> None:
        with self._lock:
            if not self._closed:
                self._index.tier.use(path, cost=cost, computed=computed, expected=expected)

    def bytes_on_disk(self, key: bytes, payload_bytes: int, parent: bytes | None = None) -> int:
        header = Header(key, parent, payload_bytes, 0.0, self._folder.identity, b"")
        return self._folder.size_on_disk(header.file_bytes)

    def remove(self, key: bytes) -> bool:
        with self._lock:
            if key not in self._index.chunks:
                return True
            chunk = self._index.remove(key)
        self._tell([key])
        return self._remove_files([chunk])

    def parents(self) -> dict[bytes, bytes | None]:
        with self._lock:
            return self._index.parents()

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect keys, present or not, until each `pin` has its `unpin`."""
        with self._lock:
            self._index.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._index.unpin(keys)

    def close(self) -> None:
        """Wait for reads and writes, and release the folder. Afterwards the store is empty."""
        with self._lock:
            self._closed = True
            self._idle.wait_for(lambda: not self._busy)
            self._index.clear()
            self._folder.close()

    def _restore(self) -> int:
        folder, index = self._folder, self._index
        found = scan(folder, self.counters)
        index.other_bytes = found.occupied
        for name, header, size, written in found.chunks:
            chunk = StoredChunk(name, header, folder.size_on_disk(size), written)
            index.restore(header.key, chunk, header.parent, header.cost)
        self.counters.restored = len(index.chunks)
        evicted = index.shrink()
        self.counters.evicted += len(evicted)
        self._remove_files(evicted.values())
        return found.serial

    def _fill(self, key: bytes, chunk: StoredChunk, into: bytearray | memoryview) -> None:
        with memoryview(into).cast("B") as payload:
            if len(payload) != chunk.payload_bytes:
                raise BadHeaderError("size")
            head = bytearray(chunk.header_bytes)
            _, status = self._folder.read(chunk.name, memoryview(head), payload)
            if status.st_size != chunk.header_bytes + chunk.payload_bytes:
                raise BadHeaderError("truncated")
            header = check(self._folder, chunk.name, bytes(head), status.st_size)
            if header.key != key:
                raise BadHeaderError("foreign")
            if header.payload_checksum != checksum(payload):
                raise BadHeaderError("checksum")

    def _after_reading(self, key: bytes, chunk: StoredChunk, failed: OSError | BadHeaderError | None) -> bool:
        with self._lock:
            if failed is None:
                self.counters.hits += 1
                return False
            if self._index.chunks.get(key) is not chunk:
                # Evicted, and maybe rewritten, while this thread read it.
                self.counters.misses += 1
                return False
            if isinstance(failed, BadHeaderError):
                self.counters.refused[failed.reason] += 1
            elif isinstance(failed, FileNotFoundError):
                self.counters.refused["missing"] += 1
            else:
                self.counters.failed_read(failed)
                if failed.errno in _PASSING:
                    return False
            self._index.remove(key)
            return True

    def _reserve(self, key: bytes, size: int, protected: Container[bytes]) -> dict[bytes, StoredChunk] | None:
        if self._closed or key in self._writing:
            return None
        if self._breaker.left_s:
            self.counters.skipped_writes += 1
            return None
        evicted = self._index.make_room(size, protected)
        if evicted is None:
            self.counters.refused["room"] += 1
            return None
        self.counters.evicted += len(evicted)
        self._breaker.begin()
        self._writing.add(key)
        self._busy += 1
        return evicted

    def _remove_evicted(self, evicted: dict[bytes, StoredChunk], size: int) -> None:
        self._tell(list(evicted))
        stuck = sum(chunk.bytes_on_disk for chunk in evicted.values() if not self._folder.remove(chunk.name))
        with self._lock:
            reserved = max(size, sum(chunk.bytes_on_disk for chunk in evicted.values()))
            self._index.other_bytes += size + stuck - reserved
        if stuck:
            raise OSError(errno.EIO, "the file of an evicted chunk cannot be removed")

    def _put(self, name: ChunkName, header: Header, payload: memoryview, protected: Container[bytes]) -> None:
        # Evict older chunks if the disk is full. A partial file that cannot be removed counts.
        try:
            self._put_once(name, header, payload)
        except OSError as error:
            if error.errno not in _FULL or not self._free_disk(self._folder.size_on_disk(header.file_bytes), protected):
                raise
            self._put_once(name, header, payload)

    def _put_once(self, name: ChunkName, header: Header, payload: memoryview) -> None:
        try:
            self._folder.write(name, header.pack(), payload)
        except OSError:
            if not self._folder.remove(name.temporary):
                with self._lock:
                    self._index.other_bytes += self._folder.size_on_disk(header.file_bytes)
            raise

    def _free_disk(self, size: int, protected: Container[bytes]) -> bool:
        # If this did not help last time, other programs take the freed space: try it once after each pause.
        with self._lock:
            evicted = self._index.evict(size, protected) if self._breaker.is_first else {}
            self.counters.evicted += len(evicted)
        self._tell(list(evicted))
        self._remove_files(evicted.values())
        return bool(evicted)

    def _count_use(self, key: bytes, cost: float | None, used: bool, expected: Mapping[bytes, float]) -> None:
        if used:
            self._index.tier.use((key,), cost=cost, computed=(key,), expected=expected)

    def _count_write(self, failed: OSError | None) -> None:
        if failed is None:
            self.counters.stored += 1
            if self._breaker.succeeded():
                self._logger.info("%s can be written again", self._folder.path)
            return
        self.counters.failed_write(failed)
        seconds = self._breaker.failed()
        if seconds:
            self.counters.pauses += 1
            why = failed.strerror or failed
            self._logger.warning("%s: %s: writing pauses for %g s", self._folder.path, why, seconds)

    def _remove_files(self, chunks: Iterable[StoredChunk]) -> bool:
        outcomes = [(chunk.bytes_on_disk, self._folder.remove(chunk.name)) for chunk in chunks]
        with self._lock:
            self._index.other_bytes -= sum(size for size, removed in outcomes if removed)
        return all(removed for _, removed in outcomes)

    def _tell(self, keys: Sequence[bytes]) -> None:
        if keys and self._removed is not None:
            self._removed(keys)

    def _leave(self, written: bytes | None = None) -> None:
        with self._lock:
            self._busy -= 1
            if written is not None:
                self._writing.discard(written)
            if not self._busy:
                self._idle.notify_all()
