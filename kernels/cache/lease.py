"""Lease: the blocks of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ragorder.kernels.cache.node import DeviceCopy, DeviceLoad
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens

__all__ = ["Borrowed", "KVLease"]


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """A copy of a document that stands at position `start` of the request."""

    start: int
    copy: DeviceCopy

    @property
    def tokens(self) -> int:
        return self.copy.node.tokens


@dataclass(slots=True, eq=False, repr=False)
class KVLease:
    """Blocks of one request: cached ones and its own. Written by the cache only.

    - `cached_tokens`: tokens with KV once `ready`, by tier in `tokens_by_tier`; falls before `extend` if a load fails.
    - `block_table`: the pool's blocks of the first `tokens` tokens, writable from entry `writable_from` on.
    - `pinned`: nodes of the path kept on the device, root first, ending at token `committed`; `pending` ones are in the
      step under way.
    - `borrowed`: copies of documents behind the cached prefix, computed elsewhere, to be copied into own blocks.
    - `background`: it is of no request, and what it finds is no use of that.
    """

    path: tuple[Segment, ...]
    poll: Callable[[], None]
    block_table: list[int] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    tokens_by_tier: TierTokens = field(default_factory=TierTokens)
    committed: int = 0
    writable_from: int = 0
    pinned: list[DeviceCopy] = field(default_factory=list)
    pending: list[DeviceCopy] = field(default_factory=list)
    borrowed: list[Borrowed] = field(default_factory=list)
    background: bool = False
    started: bool = False
    counted: bool = False
    closed: bool = False

    @property
    def ready(self) -> bool:
        """Whether everything cached is on the device. Advances the loads."""
        self.poll()
        # A borrowed copy is read before the step that may be computing it now.
        return all(copy.load is None for copy in self.pinned) and not any(
            borrowed.copy.resident and not borrowed.copy.ready for borrowed in self.borrowed
        )

    def wait(self) -> None:
        """Until the loads have ended."""
        while (load := self._load_under_way()) is not None:
            load.wait()

    def _load_under_way(self) -> DeviceLoad | None:
        self.poll()
        copies = (*self.pinned, *(borrowed.copy for borrowed in self.borrowed))
        return next((copy.load for copy in copies if copy.load is not None), None)
