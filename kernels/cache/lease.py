"""What a request holds of the cache while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.cache.node import DeviceCopy
from ragorder.kernels.cache.segments import Segment
from ragorder.kernels.cache.stats import TierTokens

if TYPE_CHECKING:
    from ragorder.kernels.cache.cache import KnowledgeCache

__all__ = ["Lease"]


class Lease:
    """The blocks of a request, those that it found and its own.

    - `cached_tokens`: the KV of so many tokens is in the blocks, once the lease is `ready`. Before it is extended for
      the first time this may fall, as what could not be loaded must be computed. `tokens_by_tier` says where they were.
    - `block_table`: the pool's blocks of the first `tokens` tokens, in order.

    The cache alone writes any of these. `held` are the nodes of the path that it keeps on the device, root first;
    `uncertain` are those of them that the step under way computes; `own` is the first entry of the table that the
    request may write to.
    """

    __slots__ = (
        "_cache",
        "begun",
        "block_table",
        "cached_tokens",
        "closed",
        "committed",
        "counted",
        "held",
        "own",
        "path",
        "tokens",
        "tokens_by_tier",
        "uncertain",
    )

    def __init__(self, cache: KnowledgeCache, path: tuple[Segment, ...]) -> None:
        self.path = path
        self.block_table: list[int] = []
        self.cached_tokens = 0
        self.tokens_by_tier = TierTokens()
        self.tokens = 0
        self.own = 0
        self.committed = 0
        self.held: list[DeviceCopy] = []
        self.uncertain: list[DeviceCopy] = []
        self.begun = self.counted = self.closed = False
        self._cache = cache

    @property
    def ready(self) -> bool:
        """Whether all that was cached is on the device. Asking helps it on."""
        self._cache.poll()
        return all(copy.load is None for copy in self.held)

    def wait(self) -> None:
        """Until it is ready."""
        while not self.ready:
            for copy in self.held:
                if copy.load is not None:
                    copy.load.wait()
                    break
