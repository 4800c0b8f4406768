"""Eviction order of vLLM's block pool."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from ragorder.adapters.request_facts import RequestFacts
from ragorder.trie.policies import Tier
from ragorder.trie.tree import Key

P = ParamSpec("P")

_logger = logging.getLogger("ragorder")

_NO_FACTS = RequestFacts()


class WatchedQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's free queue, which tells `watcher` each block taken or freed. The watcher must not raise."""

    def __init__(self, blocks: list[Any], watcher: DeviceOrder) -> None:
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
        """Move blocks to the front without telling the watcher. The queue is consistent after each move."""
        for block in blocks:
            if block.prev_free_block is not None and block.next_free_block is not None:
                super().remove(block)
                super().prepend_n([block])


def _safe(step: Callable[Concatenate[DeviceOrder, P], None]) -> Callable[Concatenate[DeviceOrder, P], None]:
    @wraps(step)
    def run(self: DeviceOrder, /, *arguments: P.args, **named: P.kwargs) -> None:
        self._safely(step, *arguments, **named)

    return run


class DeviceOrder:
    """Evicts cached blocks of vLLM's pool by a tier's policy, in O(log n) per block.

    The tier has the cached blocks by hash, and pins those in use. When vLLM needs blocks, the front of its free queue
    gets spare ones, whose content another block has, then the tier's victims. After an error this order stays off.
    """

    def __init__(self, pool: Any, tier: Tier, *, now: Callable[[], float] = time.monotonic) -> None:
        self.cached = self.stored = self.evicted = self.failures = 0
        # All blocks except vLLM's null block.
        self.capacity = pool.num_gpu_blocks - 1
        self._pool = pool
        self._tier = tier
        self._now = now
        # vLLM makes a new map when it resets the prefix cache.
        self._contents = pool.cached_block_hash_to_block
        # Blocks and the times at which the tier got them, by key, the oldest first.
        self._blocks: OrderedDict[Key, tuple[Any, float]] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self._spare: OrderedDict[int, Any] = OrderedDict()
        free = pool.free_block_queue.get_all_free_blocks()
        self._queue = pool.free_block_queue = WatchedQueue(free, self)
        self.returned(free)

    @property
    def oldest_seconds(self) -> float:
        return 0.0 if not self._blocks else self._now() - next(iter(self._blocks.values()))[1]

    @_safe
    def finished(
        self, block_ids: Sequence[int], cached_tokens: int, cost: float | None, facts: RequestFacts = _NO_FACTS
    ) -> None:
        """Count a request's uses of its blocks, in prompt order, before vLLM frees them. Tokens after the first
        `cached_tokens` were computed, at `cost` seconds each."""
        blocks = [block for block in map(self._pool.blocks.__getitem__, block_ids) if block.block_hash is not None]
        keys: list[Key] = [block.block_hash for block in blocks]
        parents = [None, *keys][: len(keys)]
        # Start at the last block: then the path has one leaf only. From the first block on, each would be a leaf until
        # its child is inserted.
        for block, parent in zip(reversed(blocks), reversed(parents), strict=True):
            if self._is_known(block):
                self._attach(block.block_hash, parent)
            elif self._admit(block, parent):
                self._tier.pin(block.block_hash)
        ends = [block.block_hash_num_tokens or 0 for block in blocks]
        computed = {key for key, end in zip(keys, ends, strict=True) if end > cached_tokens}
        within = bisect_right(ends, facts.documents[-1]) if facts.documents else len(ends)
        self._tier.use(keys[:within], cost=cost, computed=computed, expected=facts.forecast(keys, ends))

    def _safely(self, step: Callable[..., None], *arguments: Any, **named: Any) -> None:
        if self.failures:
            return
        try:
            if self._contents is not self._pool.cached_block_hash_to_block:
                self._contents = self._pool.cached_block_hash_to_block
                self._clear()
            step(self, *arguments, **named)
        except Exception as error:
            self.failures += 1
            self._clear()
            _logger.warning(
                "ragorder stopped ordering device blocks (%s in %s): vLLM now evicts the least recently used first",
                type(error).__name__,
                step.__name__,
            )
        self.cached = len(self._blocks)

    @_safe
    def leaving(self, count: int) -> None:
        for block in islice(self._queue.iter_blocks_after(None), count):
            if block.block_hash is not None:
                break
            count -= 1
        self._queue.bring_forward(reversed(self._victims(count)))

    @_safe
    def left(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._spare.pop(block.block_id, None)
            if block.block_id in self._keys:
                self._drop(self._keys[block.block_id])
                self.evicted += 1

    @_safe
    def hit(self, block: Any) -> None:
        if self._spare.pop(block.block_id, None) is None and block.block_id in self._keys:
            self._tier.pin(self._keys[block.block_id])

    @_safe
    def returned(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if self._is_known(block):
                self._tier.unpin(block.block_hash)
            elif block.block_hash is not None and not self._admit(block, None):
                self._spare[block.block_id] = block

    def _victims(self, count: int) -> list[Any]:
        victims: list[Any] = []
        while self._spare and len(victims) < count:
            victims.append(self._spare.popitem(last=False)[1])
        missing = count - len(victims)
        keys = self._tier.evict(missing)
        if keys is None:
            # The tier cannot evict all of these at once: evict one by one until it has no more.
            keys = [key for _ in range(missing) for key in self._tier.evict(1) or ()]
        self.evicted += len(keys)
        return victims + [self._forget(key) for key in keys]

    def _is_known(self, block: Any) -> bool:
        key = self._keys.get(block.block_id)
        if key is None:
            return False
        if key == block.block_hash:
            return True
        self._drop(key)
        return False

    def _admit(self, block: Any, parent: Key | None) -> bool:
        key = block.block_hash
        if self._contents.get_one_block(key) is not block:
            return False
        if key in self._blocks:
            # Another block had this content before, and lost it without a call to this class.
            self._queue.bring_forward([self._drop(key)])
        self._tier.insert(key, parent=parent)
        self._blocks[key] = block, self._now()
        self._keys[block.block_id] = key
        self.stored += 1
        return True

    def _attach(self, key: Key, parent: Key | None) -> None:
        """Give a known block its parent: a preempted request's blocks come without."""
        node = self._tier.get(key)
        if parent is not None and node is not None and node.parent is None:
            pins = node.pins
            self._tier.remove(key)
            self._tier.insert(key, parent=parent, known=node)
            for _ in range(pins):
                self._tier.pin(key)

    def _drop(self, key: Key) -> Any:
        self._tier.remove(key)
        return self._forget(key)

    def _forget(self, key: Key) -> Any:
        block, _ = self._blocks.pop(key)
        del self._keys[block.block_id]
        return block

    def _clear(self) -> None:
        self._tier.clear()
        self._blocks.clear()
        self._keys.clear()
        self._spare.clear()
