"""Copies of KV to other positions, with rotated keys (FusionRAG appendix A.1).

Rows are (tokens, layers, 2, KV heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.paging import BlockPool, KVShape

# Rows per chunk: small compared to the pool.
_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens` tokens with KV at position `source`, in the `blocks` that cover it, to be used at position `target`."""

    blocks: Sequence[int]
    source: int
    tokens: int
    target: int


class Assembler:
    def __init__(self, pool: BlockPool, rotation: Rotation) -> None:
        self._pool = pool
        self._rotation = rotation

    def copy(self, documents: Sequence[Rows], table: Sequence[int]) -> None:
        size, device = self._pool.shape.block_size, self._pool.device
        columns = np.concatenate([_columns(rows, table, size) for rows in documents], axis=1)
        for begin in range(0, columns.shape[1], _CHUNK):
            self._move(*torch.from_numpy(columns[:, begin : begin + _CHUNK]).to(device))

    def _move(
        self, blocks: Tensor, offsets: Tensor, into: Tensor, into_offsets: Tensor, origin: Tensor, shift: Tensor
    ) -> None:
        turn = self._rotation.turn(shift, origin)
        views = self._pool.views
        with torch.inference_mode():
            for layer, (keys, values) in enumerate(zip(views.key_caches, views.value_caches, strict=True)):
                keys[into, into_offsets] = turn.apply(keys[blocks, offsets], layer)
                values[into, into_offsets] = values[blocks, offsets]


def _columns(rows: Rows, table: Sequence[int], block_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    # For each token: block and offset of both sides, its old position, and its shift (6, tokens).
    own = np.arange(rows.tokens, dtype=np.int64)
    origin, target = own + rows.source, own + rows.target
    held = np.asarray(rows.blocks, dtype=np.int64)[origin // block_size - rows.source // block_size]
    into = np.asarray(table, dtype=np.int64)[target // block_size]
    shift = np.full_like(own, rows.target - rows.source)
    return np.stack((held, origin % block_size, into, target % block_size, origin, shift))


def read_rows(pool: BlockPool, table: Sequence[int], begin: int, end: int) -> Tensor:
    size = pool.shape.block_size
    first = begin // size
    blocks = torch.as_tensor(table[first : -(-end // size)], dtype=torch.int64, device=pool.device)
    rows = pool.kv[blocks].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    return rows[begin - first * size : end - first * size].clone()


def moved_rows(rows: Tensor, old: int, new: int, rotation: Rotation) -> Tensor:
    if old == new:
        return rows
    turn = rotation.turn(new - old, torch.arange(old, old + len(rows), device=rows.device))
    moved = rows.clone()
    for layer in range(rows.shape[1]):
        moved[:, layer, 0] = turn.apply(rows[:, layer, 0], layer)
    return moved


def as_blocks(rows: Tensor, start: int, preceding: Tensor, shape: KVShape) -> BlockPool:
    """Return the blocks that cover rows from position `start`; the end of `preceding` fills the first one."""
    size = shape.block_size
    covering = shape.covering(start, len(rows))
    lead = start - covering.start * size
    padded = torch.zeros(len(covering) * size, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[:lead] = preceding[len(preceding) - lead :]
    padded[lead : lead + len(rows)] = rows
    blocks = BlockPool(shape, len(covering), rows.device)
    blocks.kv.copy_(padded.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4, 5))
    return blocks
