"""A bounded store of chunks in a folder."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from ragorder.kernels.store.backoff import BackOff
from ragorder.kernels.store.counters import StoreCounters
from ragorder.kernels.store.folder import ChunkFolder, StoreRefusedError
from ragorder.kernels.store.format import MAX_KEY_BYTES, BadHeaderError, Header, digest
from ragorder.kernels.store.index import ChunkIndex, StoredChunk
from ragorder.kernels.store.names import ChunkName
from ragorder.kernels.store.scan import check, scan

__all__ = ["ChunkStore"]

_logger = logging.getLogger("ragorder")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class ChunkStore:
    """Chunks of bytes by their keys (1 to 1024 bytes each), in a folder of which at most `capacity_bytes` are used:
    files with their headers, in whole blocks of the file system, those that are being written or removed included.

    What a full store gives up first is the policy's choice (`ragorder.kernels.policies`): a chunk's node is behind its
    `parent`'s, children go before parents. Writing a chunk counts as a use of it; others are told by `use`.

    `identity` says whose bytes these are: model and weights, data type, layout, all that makes equal keys stand for
    equal bytes. A folder of another identity is refused, and so is every single chunk of one.

    The store survives the process, however that ends: chunks are under their names only when they are whole, and a new
    store finds them by their headers. They come back with a frequency of 1, the oldest first, and at the cost that they
    were written with; how often they were used is not kept. Every read verifies header, key, identity and all the
    payload.

    A process has the folder alone. One that comes while another has it waits up to `patience_s`, as that may be ending.

    Nothing that happens to the disk raises from `read`, `write` or `use`: it is counted, and the answer is no. Where
    others have filled the disk, older chunks make room for newer ones, as in a full store. After some failed writes in
    a row nothing is written for a while (`BackOff`), and read on. A chunk that could not be read is out of the store,
    so that nobody asks for it again and again.

    Thread-safe: `in` is a look-up in a dictionary, and reads and writes of different threads run side by side.
    `removed` is told of the keys that leave the store, on whichever thread that happens.
    Raises StoreRefusedError if the folder cannot be had, and ValueError for settings that cannot be.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        identity: str,
        *,
        policy: str = "pgdsf",
        history: int = 0,
        back_off: BackOff | None = None,
        removed: Callable[[Sequence[bytes]], None] | None = None,
        patience_s: float = 2.0,
        logger: logging.Logger = _logger,
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a store of {capacity_bytes} bytes cannot be: give 0 or more")
        self.counters = StoreCounters()
        self._index = ChunkIndex(capacity_bytes, policy, history)
        self._back_off = back_off or BackOff()
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

    def __contains__(self, key: bytes) -> bool:
        return key in self._index.chunks

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What the store takes on the disk."""
        with self._lock:
            return self._index.used_bytes

    @property
    def oldest_written(self) -> float | None:
        """When the oldest chunk was written, in seconds since the epoch; None in an empty store."""
        with self._lock:
            return next((chunk.written for chunk in self._index.chunks.values()), None)

    @property
    def pausing(self) -> bool:
        """Whether nothing is written now, as writes have failed."""
        with self._lock:
            return self._back_off.pausing

    def read(self, key: bytes, into: bytearray | memoryview) -> bool:
        """Copy a chunk into a buffer of its size: whether that now holds the chunk. If not, it may hold anything."""
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
                self._clean([chunk])
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
        protected: Container[bytes] = (),
    ) -> bool:
        """Keep a copy of a chunk: whether the store has it now (as it may have had before).

        `cost` is what a new token cost the request that computed it, in seconds; `used` says whether that counts as a
        use. Others are given up to make room, but none in `protected`.
        Raises ValueError if a key is of a length that cannot be, or the cost is none.
        """
        if not 0 < len(key) <= MAX_KEY_BYTES or (parent is not None and not 0 < len(parent) <= MAX_KEY_BYTES):
            raise ValueError(f"keys have 1 to {MAX_KEY_BYTES} bytes")
        if cost is not None and not 0 <= cost < math.inf:
            raise ValueError(f"a cost of {cost} s a token cannot be: give 0 or more, and a finite number")
        if parent == key:
            raise ValueError("a chunk cannot be behind itself")
        with memoryview(data).cast("B") as payload:
            return self._write(key, payload, parent, cost, used, protected)

    def use(self, path: Sequence[bytes], *, cost: float | None = None, computed: Container[bytes] = ()) -> None:
        """A request went along this path, root first; see `Tier.use`."""
        with self._lock:
            if not self._closed:
                self._index.tier.use(path, cost=cost, computed=computed)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Do not give these up for others, whether they are here or not, until they were released as often."""
        with self._lock:
            self._index.hold(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """Take back one `hold` of each."""
        with self._lock:
            self._index.release(keys)

    def close(self) -> None:
        """Let go of the folder, once the reads and writes under way have ended. The store is empty from then on."""
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
        going = index.shrink()
        self.counters.evicted += len(going)
        self._clean(going.values())
        return found.serial

    def _fill(self, key: bytes, chunk: StoredChunk, into: bytearray | memoryview) -> None:
        """Raises OSError, or BadHeaderError with the reason to refuse the chunk."""
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
            if header.payload_digest != digest(payload):
                raise BadHeaderError("checksum")

    def _after_reading(self, key: bytes, chunk: StoredChunk, failed: OSError | BadHeaderError | None) -> bool:
        """Count it: whether the chunk is to be cleaned away."""
        with self._lock:
            if failed is None:
                self.counters.hits += 1
                return False
            if self._index.chunks.get(key) is not chunk:
                # It was given up, or given up and written anew, while this thread read.
                self.counters.misses += 1
                return False
            if isinstance(failed, BadHeaderError):
                self.counters.refuse(failed.reason)
            elif isinstance(failed, FileNotFoundError):
                self.counters.refuse("missing")
            else:
                self.counters.failed_read(failed)
            self._index.take_out(key)
            return True

    def _write(
        self,
        key: bytes,
        payload: memoryview,
        parent: bytes | None,
        cost: float | None,
        used: bool,
        protected: Container[bytes],
    ) -> bool:
        folder, index = self._folder, self._index
        header = Header(key, parent, len(payload), cost or 0.0, folder.identity, b"")
        size = folder.size_on_disk(header.file_bytes)
        with self._lock:
            if key in index.chunks:
                return True
            going = self._admit(key, size, protected)
            if going is None:
                self._count_use(key, cost, used)
                return False
            name = ChunkName.of(key, self._serial)
            self._serial += 1
        failed: OSError | None = None
        try:
            try:
                self._make_way(going, size)
                self._put(name, header._replace(payload_digest=digest(payload)), payload, protected)
            except OSError as error:
                failed = error
            with self._lock:
                if failed is None:
                    index.add(key, StoredChunk(name, header, size, time.time()), parent)
                else:
                    index.other_bytes -= size
                self._count_use(key, cost, used)
                self._count_write(failed)
        finally:
            self._leave(key)
        return failed is None

    def _admit(self, key: bytes, size: int, protected: Container[bytes]) -> dict[bytes, StoredChunk] | None:
        """Who makes room for the chunk, None if it is not to be written now."""
        if self._closed or key in self._writing:
            return None
        if self._back_off.pausing:
            self.counters.skipped_writes += 1
            return None
        going = self._index.make_room(size, protected)
        if going is None:
            self.counters.refused_room += 1
            return None
        self.counters.evicted += len(going)
        self._writing.add(key)
        self._busy += 1
        return going

    def _make_way(self, going: dict[bytes, StoredChunk], size: int) -> None:
        """Remove the files of those who go. Raises OSError if one stays, for then there is no room."""
        self._tell(list(going))
        stuck = sum(chunk.bytes_on_disk for chunk in going.values() if not self._folder.remove(chunk.name))
        with self._lock:
            taken = max(size, sum(chunk.bytes_on_disk for chunk in going.values()))
            self._index.other_bytes += size + stuck - taken
        if stuck:
            raise OSError(errno.EIO, "what was given up cannot be removed")

    def _put(self, name: ChunkName, header: Header, payload: memoryview, protected: Container[bytes]) -> None:
        """On a disk that others have filled, in the place of older chunks. Raises OSError; if half a file stays, it
        goes on counting."""
        try:
            self._put_once(name, header, payload)
        except OSError as error:
            if error.errno not in _FULL or not self._give_way(self._folder.size_on_disk(header.file_bytes), protected):
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

    def _give_way(self, size: int, protected: Container[bytes]) -> bool:
        """Whether so much room was made below the capacity. Where that did not help the last time, others take what
        comes free: then it is tried once after each pause."""
        with self._lock:
            going = self._index.give_up(size, protected) if self._back_off.trying else {}
            self.counters.evicted += len(going)
        self._tell(list(going))
        self._clean(going.values())
        return bool(going)

    def _count_use(self, key: bytes, cost: float | None, used: bool) -> None:
        if used:
            self._index.tier.use((key,), cost=cost, computed=(key,))

    def _count_write(self, failed: OSError | None) -> None:
        if failed is None:
            self.counters.stored += 1
            if self._back_off.succeeded():
                self._logger.info("%s can be written again", self._folder.path)
            return
        self.counters.failed_write(failed)
        seconds = self._back_off.failed()
        if seconds:
            self.counters.pauses += 1
            why = failed.strerror or failed
            self._logger.warning("%s: %s: nothing is written for %g s", self._folder.path, why, seconds)

    def _clean(self, chunks: Iterable[StoredChunk]) -> None:
        """Remove the files of chunks that have left the index. Those that stay go on counting."""
        removed = sum(chunk.bytes_on_disk for chunk in chunks if self._folder.remove(chunk.name))
        with self._lock:
            self._index.other_bytes -= removed

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
