"""A simulated engine: automatic prefix caching, exact to the block."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, get_args

from ragorder.eval.engines.base import EngineCompletion

Like = Literal["lru", "vllm-0.32"]

_BlockHash = int


class SimEngine:
    """vLLM's block pool without a model: chained block hashes, reference counts, a free queue in order of use.

        SimEngine(100_000, block_size=16).generate(token_ids).cached_tokens

    A finished request frees its blocks tail first; the block of the last prompt token is always recomputed. `generate`
    keeps `in_flight` requests running; one without free blocks finishes older ones first. An answer given to `generate`
    and `admit` is computed at once, what `extend` adds only then: vLLM takes blocks for an answer step by step.

    `like`: the order of reuse, "lru" or "vllm-0.32": partly filled blocks first, and a recomputed block replaces the
    first copy once that is evicted. `capacity_tokens` excludes vLLM's null block. Raises ValueError for another `like`.
    """

    name = "sim"

    def __init__(
        self,
        *,
        block_size: int = 16,
        capacity_tokens: int | None = None,
        in_flight: int = 1,
        output_tokens: int = 32,
        prefix_caching: bool = True,
        like: Like = "lru",
    ) -> None:
        if like not in get_args(Like):
            raise ValueError(f"the simulated engine cannot imitate {like!r}: choose from {', '.join(get_args(Like))}")
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self.in_flight = in_flight
        self.kept_output_tokens = output_tokens
        self.prefix_caching = prefix_caching
        self.like = like
        self.partial_blocks_first = like == "vllm-0.32"
        self._keeps_duplicates = like == "vllm-0.32"
        self.reset()

    def reset(self) -> None:
        capacity = self.capacity_tokens
        self._unused = None if capacity is None else max(1, capacity // self.block_size)
        self._next_block = 0
        self.evicted_blocks = 0
        self._block_of: dict[_BlockHash, int] = {}
        self._duplicates: dict[_BlockHash, list[int]] = {}
        self._hash_of: dict[int, _BlockHash] = {}
        self._references: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._running: OrderedDict[int, list[int]] = OrderedDict()
        self._token_ids: dict[int, array[int]] = {}
        self._answered = 0

    def close(self) -> None:
        self.reset()

    @property
    def free_blocks(self) -> int | None:
        """None: unlimited."""
        return None if self._unused is None else self._unused + len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks that a later prompt could reuse."""
        return len(self._block_of)

    def block_hashes(self, token_ids: Sequence[int]) -> list[_BlockHash]:
        packed = array("q", token_ids)
        data = packed.tobytes()
        size = self.block_size * packed.itemsize
        chained = 0
        hashes = []
        for start in range(0, len(data) - size + 1, size):
            chained = hash((chained, data[start : start + size]))
            hashes.append(chained)
        return hashes

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Leading tokens of a prompt, in whole blocks, that are cached."""
        return len(self._hits(self.block_hashes(token_ids))) * self.block_size

    def generate(self, token_ids: Sequence[int], *, answer: Sequence[int] | None = None) -> EngineCompletion:
        """`answer` as in `admit`."""
        while len(self._running) >= self.in_flight:
            self.finish(next(iter(self._running)))
        return self.admit(token_ids, answer=answer)[0]

    def has_room(self, token_ids: Sequence[int], output_tokens: int | None = None) -> bool:
        """Whether a prompt and its answer fit without finishing another request."""
        available = self.free_blocks
        if not self.prefix_caching or available is None:
            return True
        needed = -(-(len(token_ids) + self._output_tokens(output_tokens)) // self.block_size)
        if needed <= available:
            return True
        hits = self._hits(self.block_hashes(token_ids)[: (len(token_ids) - 1) // self.block_size])
        return needed - len(hits) <= available - sum(not self._references[block] for block in hits)

    def admit(
        self, token_ids: Sequence[int], output_tokens: int | None = None, *, answer: Sequence[int] | None = None
    ) -> tuple[EngineCompletion, int]:
        """The cached tokens, and a handle for `finish`. An answer's last token never is in the cache: `output_tokens`
        are those of the answer before it, and an `answer` is given without it."""
        self._answered += 1
        handle = self._answered
        if not self.prefix_caching:
            return EngineCompletion(None, 0, len(token_ids)), handle
        if answer is None:
            answer = range(-handle * 1_000_000 - self._output_tokens(output_tokens), -handle * 1_000_000)
        tokens = self._token_ids[handle] = array("q", token_ids) + array("q", answer)
        hashes = self.block_hashes(tokens)
        hits = self._hits(hashes[: (len(token_ids) - 1) // self.block_size])
        self._hold(hits)
        self._running[handle] = hits + self._allocate(hashes, len(hits), len(tokens), handle)
        return EngineCompletion(None, len(hits) * self.block_size, len(token_ids)), handle

    def extend(self, handle: int, answer: Sequence[int]) -> None:
        """Compute on these tokens of a running request's answer. Without effect on one that had to end for its room."""
        blocks = self._running.get(handle)
        if blocks is None:
            return
        tokens = self._token_ids[handle]
        filled = len(tokens) // self.block_size
        tokens.extend(answer)
        hashes = self.block_hashes(tokens)
        for position in range(filled, min(len(hashes), len(blocks))):
            self._fill(blocks[position], hashes[position])
        blocks += self._allocate(hashes, len(blocks), len(tokens), handle)

    def common_blocks(self, handle: int, other: int) -> int:
        """Leading blocks that two running requests share; none of one that has finished."""
        pairs = zip(self._running.get(handle, ()), self._running.get(other, ()), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def finish(self, handle: int, computed_tokens: int | None = None) -> None:
        """Free the request's blocks, once. Of an aborted one only the first `computed_tokens` were computed: its other
        blocks hold nothing that a later prompt could reuse, unless another request holds them too."""
        self._token_ids.pop(handle, None)
        blocks = self._running.pop(handle, [])
        computed = len(blocks) if computed_tokens is None else computed_tokens // self.block_size
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            self._references[block] -= 1
            if self._references[block]:
                continue
            if place >= computed and (held := self._hash_of.pop(block, None)) is not None:
                self._unmap(block, held)
            if self.partial_blocks_first and block not in self._hash_of:
                # It is of no use to others, and is taken first, like one never used.
                del self._references[block]
                self._unused = None if self._unused is None else self._unused + 1
            else:
                self._free[block] = None

    def _output_tokens(self, output_tokens: int | None) -> int:
        return self.kept_output_tokens if output_tokens is None else output_tokens

    def _hits(self, hashes: Sequence[_BlockHash]) -> list[int]:
        hits = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _hold(self, hits: Sequence[int]) -> None:
        for block in hits:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def _allocate(self, hashes: Sequence[_BlockHash], first: int, tokens: int, handle: int) -> list[int]:
        blocks = []
        for position in range(first, -(-tokens // self.block_size)):
            block = self._take_block(handle)
            if block is None:
                break
            self._references[block] = 1
            blocks.append(block)
            if position < len(hashes):
                self._fill(block, hashes[position])
        return blocks

    def _fill(self, block: int, block_hash: _BlockHash) -> None:
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
        elif self._keeps_duplicates:
            self._duplicates.setdefault(block_hash, []).append(block)
        else:
            return
        self._hash_of[block] = block_hash

    def _take_block(self, handle: int) -> int | None:
        if self._unused is None or self._unused:
            if self._unused:
                self._unused -= 1
            self._next_block += 1
            return self._next_block
        while not self._free and (older := next((each for each in self._running if each != handle), None)) is not None:
            self.finish(older)
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        evicted = self._hash_of.pop(block, None)
        if evicted is not None:
            self._evict(block, evicted)
        return block

    def _evict(self, block: int, block_hash: _BlockHash) -> None:
        self.evicted_blocks += 1
        self._unmap(block, block_hash)

    def _unmap(self, block: int, block_hash: _BlockHash) -> None:
        duplicates = self._duplicates.pop(block_hash, [])
        if self._block_of[block_hash] != block:
            duplicates.remove(block)
        elif duplicates:
            self._block_of[block_hash] = duplicates.pop(0)
        else:
            del self._block_of[block_hash]
        if duplicates:
            self._duplicates[block_hash] = duplicates
