"""Copies of KV rows to other positions, with rotated keys (FusionRAG appendix A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.paging import BlockPool

__all__ = ["Assembler", "Rows"]

# Rows per chunk, so that the gathered rows of a layer stay small compared to the pool.
_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens` tokens with KV computed at position `source`, in the `blocks` that cover it, to be used at position
    `target`."""

    blocks: Sequence[int]
    source: int
    tokens: int
    target: int


class Assembler:
    """Copies within a pool. Keys are rotated once, from the positions of their computation."""

    def __init__(self, pool: BlockPool, rotation: Rotation) -> None:
        self._pool = pool
        self._rotation = rotation

    def copy(self, documents: Sequence[Rows], table: Sequence[int]) -> None:
        """Queue copies into the blocks of `table`, which begin at position 0."""
        if not documents:
            return
        size, device = self._pool.shape.block_size, self._pool.device
        columns = np.concatenate([_columns(rows, table, size) for rows in documents], axis=1)
        for begin in range(0, columns.shape[1], _CHUNK):
            self._move(*torch.from_numpy(columns[:, begin : begin + _CHUNK]).to(device))

    def _move(
        self,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        into: torch.Tensor,
        into_offsets: torch.Tensor,
        origin: torch.Tensor,
        shift: torch.Tensor,
    ) -> None:
        turn = self._rotation.turn(shift, origin)
        with torch.inference_mode():
            for layer in range(self._pool.shape.layers):
                keys, values = self._pool.key_cache(layer), self._pool.value_cache(layer)
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
