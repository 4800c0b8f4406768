"""What a store knows in memory: which chunks it has, where, what they take, and who goes first."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from ragorder.kernels.policies import Either, History, Tier, TierNode, make_policy
from ragorder.kernels.store.format import Header
from ragorder.kernels.store.names import ChunkName

__all__ = ["ChunkIndex", "StoredChunk"]


class StoredChunk:
    """A chunk that can be read: its file, what that takes on the disk, and when it was written (since the epoch)."""

    __slots__ = ("bytes_on_disk", "header_bytes", "name", "payload_bytes", "written")

    def __init__(self, name: ChunkName, header: Header, bytes_on_disk: int, written: float) -> None:
        self.name = name
        self.header_bytes = header.header_bytes
        self.payload_bytes = header.payload_bytes
        self.bytes_on_disk = bytes_on_disk
        self.written = written


class ChunkIndex:
    """The chunks by key, oldest writing first, and their tier. `other_bytes` are on the disk, too: of files that are
    being written or removed, or that are of no use. With them, the store stays within its capacity at every moment.

    Not thread-safe, but for `in` and `len`.
    """

    def __init__(self, capacity_bytes: int, policy: str, history: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.chunks: dict[bytes, StoredChunk] = {}
        self.tier = Tier(make_policy(policy), History(history) if history else None)
        self.other_bytes = 0
        self._held: dict[bytes, int] = {}

    @property
    def used_bytes(self) -> int:
        return self.tier.used + self.other_bytes

    def restore(self, key: bytes, chunk: StoredChunk, parent: bytes | None, cost: float) -> None:
        """A chunk of an earlier process: as if it had been used once, by a request that computed it."""
        known = TierNode(key)
        known.frequency, known.misses, known.cost = 1, 1, cost
        self.chunks[key] = chunk
        self.tier.insert(key, chunk.bytes_on_disk, parent, known=known)

    def add(self, key: bytes, chunk: StoredChunk, parent: bytes | None) -> None:
        """A chunk whose room was made before."""
        self.other_bytes -= chunk.bytes_on_disk
        self.chunks[key] = chunk
        self.tier.insert(key, chunk.bytes_on_disk, parent)

    def take_out(self, key: bytes) -> StoredChunk:
        """The chunk is none any more; its file still is, in `other_bytes`."""
        chunk = self.chunks.pop(key)
        self.tier.remove(key)
        self.other_bytes += chunk.bytes_on_disk
        return chunk

    def make_room(self, bytes_on_disk: int, protected: Container[bytes] = ()) -> dict[bytes, StoredChunk] | None:
        """Give up others for a new file; None, and nothing is given up, if that does not do. Their files are to be
        removed before the new one is made; in `other_bytes` are whichever of the two is more."""
        if self.other_bytes + bytes_on_disk > self.capacity_bytes:
            return None
        missing = self.used_bytes + bytes_on_disk - self.capacity_bytes
        victims = self._evict(missing, protected) if missing > 0 else []
        if victims is None:
            return None
        going = {victim: self.chunks.pop(victim) for victim in victims}
        self.other_bytes += max(bytes_on_disk, sum(chunk.bytes_on_disk for chunk in going.values()))
        return going

    def give_up(self, bytes_on_disk: int, protected: Container[bytes] = ()) -> dict[bytes, StoredChunk]:
        """Give up so much, or nothing if that cannot be. The files are in `other_bytes` until they are removed."""
        going = {victim: self.chunks.pop(victim) for victim in self._evict(bytes_on_disk, protected) or ()}
        self.other_bytes += sum(chunk.bytes_on_disk for chunk in going.values())
        return going

    def shrink(self) -> dict[bytes, StoredChunk]:
        """Give up what is above the capacity, as far as that can be."""
        return self.give_up(min(self.used_bytes - self.capacity_bytes, self.tier.used))

    def hold(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            left = self._held.pop(key, 0) - 1
            if left > 0:
                self._held[key] = left

    def clear(self) -> None:
        self.chunks = {}
        self.tier.clear()
        self.other_bytes = 0

    def _evict(self, bytes_on_disk: int, protected: Container[bytes] = ()) -> list[bytes] | None:
        # What the tier was given are keys.
        return cast("list[bytes] | None", self.tier.evict(bytes_on_disk, Either(self._held, protected)))
