"""KV of sequences scattered in a pool, read in order of position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention.runs import QueryTurn
from ragorder.kernels.paging.pool import BlockPool

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Turn(Protocol):
    def apply(self, vectors: Tensor, layer: int) -> Tensor: ...

    def queries(self, layer: int, head_dim: int) -> QueryTurn | None: ...


class Turning(Protocol):
    def turn(self, by: Tensor | int, origin: Tensor | int | None = None) -> Turn:
        """Return the rotation of keys at positions `origin` by `by` positions."""


@dataclass(frozen=True, slots=True, eq=False)
class KVPositions:
    """Blocks and offsets of a sequence's KV, int64 (positions,). `origins`: where shared KV was computed, -1 for own.
    Shared KV is only read, its keys turned by `turning`."""

    blocks: _Ints
    offsets: _Ints
    origins: _Ints
    turning: Turning | None = None

    @property
    def moves(self) -> _Ints:
        """Distance from where each key was computed to where it is read."""
        return np.where(self.origins < 0, 0, np.arange(len(self.origins)) - self.origins)

    def rows(self, pool: BlockPool) -> _Ints:
        """Return each position's row in a layer."""
        return self.blocks * pool.block_rows + self.offsets

    @classmethod
    def of(cls, table: Any, tokens: int, block_size: int) -> Self:
        positions = np.arange(tokens, dtype=np.int64)
        blocks = np.asarray(table, dtype=np.int64)[positions // block_size]
        return cls(blocks, positions % block_size, np.full_like(positions, -1))


class Gathered:
    """The first `lengths` positions of each sequence, in blocks of their own; `tables` are for `layer`."""

    def __init__(self, pool: BlockPool, places: Sequence[KVPositions], lengths: Sequence[int]) -> None:
        shape = pool.shape
        self._pool = pool
        starts = list(accumulate(map(shape.blocks_for, lengths), initial=0))
        self.tables = [np.arange(*each, dtype=np.int32) for each in pairwise(starts)]
        rows = np.zeros(starts[-1] * shape.block_size, dtype=np.int64)
        origins = np.full_like(rows, -1)
        moves = np.zeros_like(rows)
        turning: Turning | None = None
        for each, start, length in zip(places, starts, lengths, strict=False):
            # The rest of a last block is any row: none attends to it.
            own = slice(start * shape.block_size, start * shape.block_size + length)
            rows[own] = each.rows(pool)[:length]
            origins[own] = each.origins[:length]
            moves[own] = each.moves[:length]
            turning = turning or each.turning
        shared = np.flatnonzero(origins >= 0)
        self._rows = torch.from_numpy(rows).to(pool.device)
        self._shared = torch.from_numpy(shared).to(pool.device)
        self._turn: Turn | None = None
        if turning is not None and len(shared):
            by, origin = (torch.from_numpy(each[shared]).to(pool.device) for each in (moves, origins))
            self._turn = turning.turn(by, origin)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (blocks, block size, KV heads, D)."""
        views, shape = self._pool.views, self._pool.shape
        with self._pool.supplied(layer):
            keys = views.key_rows[layer].index_select(0, self._rows)
            values = views.value_rows[layer].index_select(0, self._rows)
        if self._turn is not None:
            keys.index_copy_(0, self._shared, self._turn.apply(keys.index_select(0, self._shared), layer))
        blocked = (-1, shape.block_size, shape.kv_heads, shape.head_dim)
        return keys.view(blocked), values.view(blocked)
