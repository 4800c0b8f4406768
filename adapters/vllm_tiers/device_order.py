"""Which of the device's cached blocks go first."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from ragorder.adapters.vllm_tiers.device_queue import WatchedQueue
from ragorder.kernels.policies import Tier
from ragorder.trie.tree import Key

__all__ = ["DeviceOrder"]

_logger = logging.getLogger("ragorder")


class DeviceOrder:
    """Has a block pool of vLLM's give up its cached blocks in the order of a tier's policy.

    vLLM writes anew what stands at the front of its free queue: blocks without content, then those that were free for
    longest. From now on the queue tells of each block that comes and goes. The tier holds the cached blocks by their
    hashes, those in use are pinned in it; and whenever blocks are about to be taken, for whatever reason, and those
    without content at the front are too few, as many as are missing are evicted from the tier and brought to the front.
    That is O(log n) a block. Of two blocks with the same content, the one that vLLM would not find is spare, and goes
    before all others that have any. What the tier cannot give leaves in vLLM's own order.

    A reset of the prefix cache is noticed at the next step, and clears the tier with its history.

    Whatever goes wrong in here turns the order off, for good: `failures` is 1 then, it was logged, and the queue is
    vLLM's own again. An allocation never fails because of it.
    """

    def __init__(self, pool: Any, tier: Tier, *, now: Callable[[], float] = time.monotonic) -> None:
        self.cached = self.stored = self.evicted = self.failures = 0
        # All but the null block.
        self.capacity = pool.num_gpu_blocks - 1
        self._pool = pool
        self._tier = tier
        self._now = now
        # vLLM makes a new one when it resets the prefix cache.
        self._contents = pool.cached_block_hash_to_block
        # By its key, a block and when it came: the oldest first.
        self._blocks: OrderedDict[Key, tuple[Any, float]] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self._spare: OrderedDict[int, Any] = OrderedDict()
        free = pool.free_block_queue.get_all_free_blocks()
        self._queue = pool.free_block_queue = WatchedQueue(free, self)
        self.returned(free)

    @property
    def oldest_seconds(self) -> float:
        """How long ago the block came that is here for longest; 0 if there is none."""
        return 0.0 if not self._blocks else self._now() - next(iter(self._blocks.values()))[1]

    def finished(
        self, block_ids: Sequence[int], cached_tokens: int, cost: float | None, documents_end: int | None = None
    ) -> None:
        """A request has come to its end, and its blocks, first to last, are about to be free. It found so many tokens
        of its prompt cached and computed the others at `cost` seconds each (None: not known). What stands behind
        `documents_end` (in tokens; None: not known) is question and answer, which nobody will ask for again: it does
        not count as used."""
        self._safely(self._use, block_ids, cached_tokens, cost, documents_end)

    def leaving(self, count: int) -> None:
        self._safely(self._make_room, count)

    def left(self, blocks: Sequence[Any]) -> None:
        self._safely(self._strike_off, blocks)

    def hit(self, block: Any) -> None:
        self._safely(self._hold, block)

    def returned(self, blocks: Sequence[Any]) -> None:
        self._safely(self._take_back, blocks)

    def _safely(self, step: Callable[..., None], *arguments: Any) -> None:
        if self.failures:
            return
        try:
            if self._contents is not self._pool.cached_block_hash_to_block:
                self._contents = self._pool.cached_block_hash_to_block
                self._clear()
            step(*arguments)
        except Exception as error:
            self.failures += 1
            self._clear()
            _logger.warning(
                "the order of the device's blocks is off (%s in %s): vLLM gives them up least recently used first",
                type(error).__name__,
                step.__name__.strip("_"),
            )
        self.cached = len(self._blocks)

    def _make_room(self, count: int) -> None:
        for block in islice(self._queue.iter_blocks_after(None), count):
            if block.block_hash is not None:
                break
            count -= 1
        self._queue.bring_forward(reversed(self._victims(count)))

    def _victims(self, count: int) -> list[Any]:
        victims: list[Any] = []
        while self._spare and len(victims) < count:
            victims.append(self._spare.popitem(last=False)[1])
        missing = count - len(victims)
        keys = self._tier.evict(missing)
        if keys is None:
            # Not all of them are to be had: what there is, then.
            keys = [key for _ in range(missing) for key in self._tier.evict(1) or ()]
        self.evicted += len(keys)
        return victims + [self._forget(key) for key in keys]

    def _strike_off(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._spare.pop(block.block_id, None)
            if block.block_id in self._keys:
                self._drop(self._keys[block.block_id])
                self.evicted += 1

    def _hold(self, block: Any) -> None:
        if self._spare.pop(block.block_id, None) is None and block.block_id in self._keys:
            self._tier.pin(self._keys[block.block_id])

    def _take_back(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if self._is_known(block):
                self._tier.unpin(block.block_hash)
            elif block.block_hash is not None and not self._admit(block, None):
                self._spare[block.block_id] = block

    def _use(self, block_ids: Sequence[int], cached_tokens: int, cost: float | None, documents_end: int | None) -> None:
        blocks = [block for block in map(self._pool.blocks.__getitem__, block_ids) if block.block_hash is not None]
        keys: list[Key] = [block.block_hash for block in blocks]
        parents = [None, *keys][: len(keys)]
        # The last one first: it is the only leaf of the path. Each of the others would be one until the next comes.
        for block, parent in zip(reversed(blocks), reversed(parents), strict=True):
            if self._is_known(block):
                self._attach(block.block_hash, parent)
            elif self._admit(block, parent):
                self._tier.pin(block.block_hash)
        ends = [block.block_hash_num_tokens or 0 for block in blocks]
        computed = {key for key, end in zip(keys, ends, strict=True) if end > cached_tokens}
        within = len(ends) if documents_end is None else bisect_right(ends, documents_end)
        self._tier.use(keys[:within], cost=cost, computed=computed)

    def _is_known(self, block: Any) -> bool:
        """Whether the tier has it. What it had under another key, it has no longer."""
        key = self._keys.get(block.block_id)
        if key is None:
            return False
        if key == block.block_hash:
            return True
        self._drop(key)
        return False

    def _admit(self, block: Any, parent: Key | None) -> bool:
        """Into the tier with it, if it is the block that vLLM would find."""
        key = block.block_hash
        if self._contents.get_one_block(key) is not block:
            return False
        if key in self._blocks:
            # What had this content has lost it while nobody looked.
            self._queue.bring_forward([self._drop(key)])
        self._tier.insert(key, parent=parent)
        self._blocks[key] = block, self._now()
        self._keys[block.block_id] = key
        self.stored += 1
        return True

    def _attach(self, key: Key, parent: Key | None) -> None:
        """Blocks of a request that was preempted came without their parents."""
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
