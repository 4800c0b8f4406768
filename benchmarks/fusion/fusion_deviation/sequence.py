"""KV of one sequence at a time, on the embedded engine's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.engine.scoring import Scorer
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool

__all__ = ["KVSequence"]


class KVSequence:
    """A pool with the blocks of one sequence of at most `tokens` tokens. KV: (n, layers, 2, KV heads, D).

    Raises UnsupportedModelError for a model whose keys cannot be moved, ValueError for one of a single layer. Until
    `close` the model has the engine's attention.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = PatchedModel(model, EngineSettings(verify=False))
        try:
            if self._model.shape.layers < 2:
                raise ValueError(f"{self._model.name} has one layer, whose KV never deviates: give another model")
            self._rotation = Rotation.of(model)
        except BaseException:
            self.close()
            raise
        shape, self._device = self._model.shape, self._model.device
        self._pool = BlockPool(shape, shape.blocks_for(tokens), self._device)
        self.table = np.asarray(self._pool.allocate(self._pool.blocks), dtype=np.int32)
        self._blocks = torch.as_tensor(self.table, dtype=torch.int64, device=self._device)
        self.scorer = Scorer(self._model.forward, self._pool, self._rotation)

    def close(self) -> None:
        self._model.restore()

    def compute(self, token_ids: Sequence[int], start: int) -> Tensor:
        """KV of new tokens behind the first `start` ones."""
        self._model.forward(*pack([Piece(token_ids, start, self.table, False)], self._pool))
        return self.read(start, start + len(token_ids))

    def read(self, start: int, end: int) -> Tensor:
        return self._pool.kv[self._rows(start, end)].clone()

    def put(self, kv: Tensor, start: int) -> None:
        self._pool.kv[self._rows(start, start + len(kv))] = kv

    def moved(self, kv: Tensor, old: int, new: int) -> Tensor:
        """KV computed from position `old` on, as it stands from `new` on."""
        turn = self._rotation.turn(new - old, torch.arange(old, old + len(kv)))
        keys = [turn.apply(kv[:, layer, 0], layer) for layer in range(kv.shape[1])]
        return torch.stack([torch.stack(keys, 1), kv[:, :, 1]], 2)

    def put_together(self, copies: Iterable[Tensor], made_at: int, start: int) -> int:
        """Copies computed from position `made_at` on, one after another from `start` on; returns where they end."""
        for kv in copies:
            self.put(self.moved(kv, made_at, start), start)
            start += len(kv)
        return start

    def _rows(self, start: int, end: int) -> tuple[Tensor, slice, slice, Tensor]:
        size = self._pool.shape.block_size
        at = torch.arange(start, end, device=self._device)
        return self._blocks[at // size], slice(None), slice(None), at % size
