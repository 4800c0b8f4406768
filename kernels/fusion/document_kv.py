"""A document's KV as rows (tokens, layers, 2, KV heads, head_dim) or as blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.paging import BlockPool, KVShape

__all__ = ["as_blocks", "moved_rows", "read_rows"]


def read_rows(pool: BlockPool, table: Sequence[int], begin: int, end: int) -> Tensor:
    """Copy the rows at positions `begin` to `end` of a sequence in the blocks `table`."""
    size = pool.shape.block_size
    first = begin // size
    blocks = torch.as_tensor(table[first : -(-end // size)], dtype=torch.int64, device=pool.device)
    rows = pool.kv[blocks].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    return rows[begin - first * size : end - first * size].clone()


def moved_rows(rows: Tensor, old: int, new: int, rotation: Rotation) -> Tensor:
    """Return rows of consecutive tokens moved from `old` to `new`, the first one's positions."""
    if old == new:
        return rows
    turn = rotation.turn(new - old, torch.arange(old, old + len(rows), device=rows.device))
    moved = rows.clone()
    for layer in range(rows.shape[1]):
        moved[:, layer, 0] = turn.apply(rows[:, layer, 0], layer)
    return moved


def as_blocks(rows: Tensor, start: int, preceding: Tensor, shape: KVShape) -> BlockPool:
    """Return the blocks that cover rows from position `start`, in the rows' memory.

    The end of `preceding`, up to `start`, fills the first block before them.
    """
    size = shape.block_size
    covering = shape.covering(start, len(rows))
    lead = start - covering.start * size
    padded = torch.zeros(len(covering) * size, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[:lead] = preceding[len(preceding) - lead :]
    padded[lead : lead + len(rows)] = rows
    blocks = BlockPool(shape, len(covering), rows.device)
    blocks.kv.copy_(padded.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4, 5))
    return blocks
