"""Index of a store: chunks by key, sizes and the replacement tier."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from ragorder.kernels.store.format import ChunkName, Header
from ragorder.trie.policies import History, Tier, TierNode, make_policy

__all__ = ["ChunkIndex", "StoredChunk"]


class StoredChunk:
    __slots__ = ("bytes_on_disk", "header_bytes", "name", "payload_bytes", "written")

    def __init__(self, name: ChunkName, header: Header, bytes_on_disk: int, written: float) -> None:
        self.name = name
        self.header_bytes = header.header_bytes
        self.payload_bytes = header.payload_bytes
        self.bytes_on_disk = bytes_on_disk
        self.written = written


class ChunkIndex:
    """Chunks by key, oldest write first. `other_bytes` are of files being written, being removed, or unusable."""

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
        """Evict for a new file, or return None, evicting nothing, if that is not enough. `other_bytes` grows by the
        larger size: remove the evicted files before writing."""
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
