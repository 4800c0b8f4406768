"""Lease: the blocks of one request."""

from __future__ import annotations

from collections.abc import Callable

from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens

__all__ = ["KVLease"]


class KVLease:
    """Blocks of one request: cached ones and its own. Written by the cache only.

    - `cached_tokens`: tokens with KV once `ready`, by tier in `tokens_by_tier`; falls before `extend` if a load fails.
    - `block_table`: the pool's blocks of the first `tokens` tokens, writable from entry `writable_from` on.
    - `pinned`: nodes of the path kept on the device, root first, ending at token `committed`; `pending` ones are in the
      step under way.
    """

    __slots__ = (
        "_poll",
        "block_table",
        "cached_tokens",
        "closed",
        "committed",
        "counted",
        "path",
        "pending",
        "pinned",
        "started",
        "tokens",
        "tokens_by_tier",
        "writable_from",
    )

    def __init__(self, path: tuple[Segment, ...], poll: Callable[[], None]) -> None:
        self.path = path
        self.block_table: list[int] = []
        self.cached_tokens = self.tokens = self.committed = self.writable_from = 0
        self.tokens_by_tier = TierTokens()
        self.pinned: list[DeviceCopy] = []
        self.pending: list[DeviceCopy] = []
        self.started = self.counted = self.closed = False
        self._poll = poll

    @property
    def ready(self) -> bool:
        """Whether everything cached is on the device. Advances the loads."""
        self._poll()
        return all(copy.load is None for copy in self.pinned)

    def wait(self) -> None:
        while not self.ready:
            for copy in self.pinned:
                if copy.load is not None:
                    copy.load.wait()
                    break
