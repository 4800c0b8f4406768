"""KV moved to other positions, with rotated keys (FusionRAG 4.3, A.1).

Tensors of rows are (tokens, layers, 2, KV heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.paging import BlockPool, KVPositions, KVShape


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens` tokens of KV from position `source`, in the `blocks` that cover it, used from `target` on."""

    blocks: Sequence[int]
    source: int
    tokens: int
    target: int


class Layout:
    """Where a sequence of `tokens` tokens has its KV: `shared` spans where they were computed, all else in own blocks,
    followed by recomputed tokens of documents."""

    def __init__(self, tokens: int, shared: Sequence[tuple[int, int]], rotation: Rotation) -> None:
        own = np.ones(tokens, dtype=np.bool_)
        for begin, end in shared:
            own[begin:end] = False
        # Before the first shared token, slots are positions.
        self._slots = np.where(own, np.cumsum(own) - 1, -1)
        self._used = int(own.sum())
        self._rotation = rotation

    def room(self, tokens: int) -> int:
        """Return the tokens in own blocks once the sequence has `tokens`."""
        return self._used + tokens - len(self._slots)

    def take(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Give tokens own places, which hide their documents' KV."""
        new = positions[self._slots[positions] < 0]
        self._slots[new] = self._used + np.arange(len(new))
        self._used += len(new)

    def places(self, tokens: int, table: Sequence[int], shared: Sequence[Rows], block_size: int) -> KVPositions:
        if tokens > len(self._slots):
            following = np.arange(self._used, self.room(tokens))
            self._slots, self._used = np.concatenate((self._slots, following)), self.room(tokens)
        slots = self._slots[:tokens].copy()
        origins = np.full_like(slots, -1)
        blocks = np.asarray(table, dtype=np.int64)[slots.clip(0) // block_size]
        for rows in shared:
            at = rows.target + np.flatnonzero(slots[rows.target : rows.target + rows.tokens] < 0)
            source = origins[at] = at + (rows.source - rows.target)
            blocks[at] = np.asarray(rows.blocks)[source // block_size - rows.source // block_size]
        return KVPositions(blocks, np.where(origins < 0, slots, origins) % block_size, origins, self._rotation)


def read_rows(pool: BlockPool, table: Sequence[int], begin: int, end: int) -> Tensor:
    size = pool.shape.block_size
    first = begin // size
    blocks = torch.as_tensor(table[first : -(-end // size)], dtype=torch.int64, device=pool.device)
    rows = pool.read(blocks).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
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
    """Return blocks that cover rows from position `start`; the end of `preceding` fills the first."""
    size = shape.block_size
    covering = shape.covering(start, len(rows))
    lead = start - covering.start * size
    padded = torch.zeros(len(covering) * size, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[:lead] = preceding[len(preceding) - lead :]
    padded[lead : lead + len(rows)] = rows
    blocks = BlockPool(shape, len(covering), rows.device)
    blocks.kv.copy_(padded.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4, 5))
    return blocks
