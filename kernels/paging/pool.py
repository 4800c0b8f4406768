"""Pool of KV blocks in one memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple, Self

import torch

from ragorder.errors import RagorderError


@dataclass(frozen=True, slots=True)
class KVShape:
    """`head_dim` numbers of key and value per layer, KV head and token."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def block_rows(self) -> int:
        return 2 * self.layers * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def covering(self, start: int, tokens: int) -> range:
        """Return the blocks that cover `tokens` tokens (1 or more) from `start`."""
        return range(start // self.block_size, (start + tokens - 1) // self.block_size + 1)


@dataclass(frozen=True, slots=True, eq=False)
class _LayerViews:
    """By layer: caches (blocks, block_size, kv_heads, head_dim), and rows (.., kv_heads, head_dim) from the layer's
    first. A token has one row index in all layers."""

    key_rows: list[torch.Tensor]
    value_rows: list[torch.Tensor]
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], shape: KVShape) -> Self:
        found, size = cls([], [], [], []), shape.block_size
        for kv in parts:
            rows = kv.view(-1, shape.kv_heads, shape.head_dim)
            for layer in range(kv.shape[1]):
                # A layer's values follow its keys, so that as many rows are from its first value on.
                found.key_rows.append(rows[2 * layer * size : max(0, len(rows) - size)])
                found.value_rows.append(rows[(2 * layer + 1) * size :])
                found.key_caches.append(kv[:, layer, 0])
                found.value_caches.append(kv[:, layer, 1])
        return found


class OutOfBlocksError(RagorderError, RuntimeError):
    """Too few blocks are free. Nothing has changed."""


class StepBlocks(NamedTuple):
    """Blocks of a step, ascending; `written` are among those `read`."""

    read: Sequence[int]
    written: Sequence[int]


class Part(NamedTuple):
    """Bytes (blocks, n) of a pool, of each block from byte `first` on."""

    bytes: torch.Tensor
    first: int
    device: torch.device


class BlockPool:
    """Reference-counted blocks. Only their contents are thread-safe. `kv` (blocks, layers, 2, block_size, kv_heads,
    head_dim) starts as zeros, because masked values must be finite. On a CPU a block takes memory when it is first
    written, unless `pinned`."""

    def __init__(
        self, shape: KVShape, blocks: int, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> None:
        if blocks < 0:
            raise ValueError(f"blocks is {blocks}: give 0 or more")
        self.shape = shape
        self.blocks = blocks
        self.device = torch.device(device)
        self._pinned = pinned
        self._memory = self._make(blocks)
        self._views: _LayerViews | None = None
        self._references = [0] * blocks
        # A stack: the last block is allocated first.
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.blocks - len(self._free)

    @property
    def used_bytes(self) -> int:
        return self.used_blocks * self.shape.block_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.blocks * self.shape.block_bytes

    @property
    def kv(self) -> torch.Tensor:
        return self._memory[0]

    @property
    def block_rows(self) -> int:
        """Rows from one block to the next, in each layer."""
        return self.shape.block_rows

    @property
    def views(self) -> _LayerViews:
        """Invalid after `resize`."""
        if self._views is None:
            self._views = _LayerViews.of(self._viewed(), self.shape)
        return self._views

    @property
    def parts(self) -> list[Part]:
        return [Part(self.kv.view(torch.uint8).view(self.blocks, self.shape.block_bytes), 0, self.device)]

    @property
    def copied(self) -> bool:
        """Whether steps need `supplied` KV."""
        return False

    def supplied(self, layer: int, blocks: StepBlocks | None = None) -> AbstractContextManager[None]:
        """Keep the KV of a layer's `blocks` (None: all in use, to read) in `views` meanwhile."""
        return nullcontext()

    def settle(self) -> None:
        """Wait until what steps wrote can be read in all parts."""

    def read(self, blocks: Any) -> torch.Tensor:
        """Return blocks (a list, or int64 on the device) of `kv`."""
        return self.kv[blocks]

    def rows(self) -> Any:
        return self.kv.view(torch.uint8).numpy().reshape(self.blocks, self.shape.block_bytes)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take free blocks with one reference and any finite contents. Raises OutOfBlocksError, taking none."""
        free = self._free
        if count > len(free):
            raise OutOfBlocksError(f"{count} blocks are needed, but only {len(free)} of {self.blocks} are free")
        taken = free[len(free) - count :][::-1]
        del free[len(free) - count :]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        references = self._references
        for block in blocks:
            if not references[block]:
                raise ValueError("a free block cannot be retained: allocate it")
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        references, free = self._references, self._free
        # Reversed, so that adjacent blocks are allocated together again and copied in one go.
        for block in reversed(blocks):
            if not references[block]:
                raise ValueError("the block is free already")
            references[block] -= 1
            if not references[block]:
                free.append(block)

    def clear(self) -> None:
        self._references = [0] * self.blocks
        self._free = list(range(self.blocks - 1, -1, -1))
        self.settle()
        for kv in self._memory:
            kv.zero_()

    def close(self) -> None:
        """Free the memory. Blocks cannot be used again."""
        self.settle()
        self._memory, self._views = self._emptied(), None

    def copy(self, source: int, target: int) -> None:
        self.settle()
        for kv in self._memory:
            kv[target].copy_(kv[source])

    def resize(self, blocks: int) -> dict[int, int]:
        """Resize, and return the new numbers of used blocks that had to move. Unless no block is used, both memories
        exist for a moment. Raises OutOfBlocksError and MemoryError, with the pool unchanged, or empty if its old memory
        could not be allocated again."""
        if blocks < 0:
            raise ValueError(f"blocks is {blocks}: give 0 or more")
        used = [block for block, references in enumerate(self._references) if references]
        if len(used) > blocks:
            raise OutOfBlocksError(f"{len(used)} blocks are in use: the pool cannot shrink to {blocks}")
        moves = self._moves(used, blocks)
        self.settle()
        memory = self._make(blocks) if used else self._replaced(blocks)
        for first, into, count in runs(used, [moves.get(block, block) for block in used]):
            for new, old in zip(memory, self._memory, strict=True):
                new[into : into + count].copy_(old[first : first + count])
        references = [0] * blocks
        for block in used:
            references[moves.get(block, block)] = self._references[block]
        self._memory, self._views, self.blocks = memory, None, blocks
        self._references = references
        self._free = [block for block in range(blocks - 1, -1, -1) if not references[block]]
        return moves

    def _moves(self, used: Sequence[int], blocks: int) -> dict[int, int]:
        spare = (block for block in range(blocks) if block >= self.blocks or not self._references[block])
        return {block: next(spare) for block in used if block >= blocks}

    def _replaced(self, blocks: int) -> list[torch.Tensor]:
        before = self.blocks
        self._memory, self._views = self._emptied(), None
        try:
            return self._make(blocks)
        except MemoryError:
            try:
                self._memory = self._make(before)
            except MemoryError:
                # An empty pool can grow again.
                self.blocks, self._references, self._free = 0, [], []
            raise

    def _emptied(self) -> list[torch.Tensor]:
        return [kv.new_empty((0, *kv.shape[1:])) for kv in self._memory]

    def _viewed(self) -> list[torch.Tensor]:
        return self._memory

    def _make(self, blocks: int) -> list[torch.Tensor]:
        return [zeros(self.shape, blocks, self.shape.layers, self.device, pinned=self._pinned)]


def zeros(shape: KVShape, blocks: int, layers: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    """Allocate KV of `layers` layers. Raises MemoryError."""
    size = (blocks, layers, 2, shape.block_size, shape.kv_heads, shape.head_dim)
    nbytes = blocks * (shape.block_bytes // shape.layers) * layers
    try:
        # Threads outside inference mode write to it.
        with torch.inference_mode(False):
            if device.type == "cpu" and not pinned and blocks:
                # torch.zeros writes every page.
                pages = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=shape.dtype).view(size)
            return torch.zeros(size, dtype=shape.dtype, device=device, pin_memory=pinned and blocks > 0)
    except (OSError, OverflowError, RuntimeError) as error:
        raise MemoryError(f"{device} has no room for {blocks} blocks, {nbytes} bytes: give the pool fewer") from error


def runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of blocks adjacent in both lists: (first source, first target, count)."""
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} blocks cannot be copied into {len(target_blocks)}")
    begin = 0
    for end in range(1, len(source_blocks) + 1):
        count = end - begin
        if (
            end == len(source_blocks)
            or source_blocks[end] != source_blocks[begin] + count
            or target_blocks[end] != target_blocks[begin] + count
        ):
            yield source_blocks[begin], target_blocks[begin], count
            begin = end
