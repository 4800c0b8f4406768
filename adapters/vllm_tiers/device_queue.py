"""vLLM's queue of free blocks, watched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

__all__ = ["QueueWatcher", "WatchedQueue"]


class QueueWatcher(Protocol):
    """Who is told of all that comes into a queue and leaves it. None of these may raise."""

    def leaving(self, count: int) -> None:
        """So many blocks are about to be taken from the front, to be written anew."""

    def left(self, blocks: Sequence[Any]) -> None:
        """These were."""

    def hit(self, block: Any) -> None:
        """This one was taken out of the queue as it is: a request has found its content."""

    def returned(self, blocks: Sequence[Any]) -> None:
        """These are free again."""


class WatchedQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """A free queue that does what vLLM's does, and tells a watcher. All that takes or frees a block goes through it:
    first chunks, further chunks, decoding, loads from a lower tier, hits, preemption."""

    def __init__(self, blocks: list[Any], watcher: QueueWatcher) -> None:
        super().__init__(blocks)
        self._watcher = watcher

    def popleft(self) -> Any:
        self._watcher.leaving(1)
        block = super().popleft()
        self._watcher.left((block,))
        return block

    def popleft_n(self, n: int) -> list[Any]:
        self._watcher.leaving(n)
        blocks: list[Any] = super().popleft_n(n)
        self._watcher.left(blocks)
        return blocks

    def remove(self, block: Any) -> None:
        super().remove(block)
        self._watcher.hit(block)

    def append(self, block: Any) -> None:
        super().append(block)
        self._watcher.returned((block,))

    def append_n(self, blocks: list[Any]) -> None:
        super().append_n(blocks)
        self._watcher.returned(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        super().prepend_n(blocks)
        self._watcher.returned(blocks)

    def bring_forward(self, blocks: Iterable[Any]) -> None:
        """Put blocks to the front that are somewhere in the queue; one that is not is passed over. The watcher is not
        told. After each block the queue is whole."""
        for block in blocks:
            if block.prev_free_block is not None and block.next_free_block is not None:
                super().remove(block)
                super().prepend_n([block])
