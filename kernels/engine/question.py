"""A question's attention in the last layer (FusionRAG 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch, prefix_attention
from ragorder.kernels.attention.weights import Keys, Queries, attention_received
from ragorder.kernels.engine.attention import PagedLayers
from ragorder.kernels.engine.batch import Piece
from ragorder.kernels.engine.forward import Forward, ForwardEnded
from ragorder.kernels.fusion.rotation import Rotation

__all__ = ["Question", "read_question"]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Its n tokens in the last layer, behind `start` tokens: `queries`, and `keys` (n, HKV, D), rotated."""

    queries: Queries
    keys: Tensor
    start: int

    def moved(self, start: int, rotation: Rotation) -> Question:
        """The same vectors behind another number of tokens."""
        old, last = self.queries.positions, len(rotation.ropes) - 1
        turn = rotation.turn(start - self.start, old)
        queries = replace(self.queries, rows=turn.apply(self.queries.rows, last), positions=old + (start - self.start))
        return Question(queries, turn.apply(self.keys, last), start)

    def attention(self, layers: PagedLayers, table: Tensor, held: Tensor | None = None) -> Tensor:
        """fp32 (start,): attention to each token in front, whose keys are in the blocks `table` (int64).

        Softmax over those that are `held` (bool (start,), by default all) and the question itself, summed over the
        question's tokens, mean over heads.
        """
        keys = Keys(layers.key_caches[-1], table, self.start, self.keys, held)
        return attention_received(self.queries, keys)[: self.start]


def read_question(forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str) -> Question:
    """A forward of a question, behind the `start` tokens with KV in its blocks. Nothing is written."""
    count = len(piece.token_ids)
    attention = _LastLayer(layers, PackedBatch.pack([count], [piece.start], [np.asarray(piece.table).tolist()], device))
    positions = torch.arange(piece.start, piece.start + count, device=device)
    forward.until_ended(torch.tensor(piece.token_ids, device=device), positions, attention)
    return Question(replace(attention.queries, positions=positions), attention.keys, piece.start)


class _LastLayer:
    """Attention that ends with the arguments of the last layer."""

    queries: Queries
    keys: Tensor

    def __init__(self, layers: PagedLayers, batch: PackedBatch) -> None:
        self._layers = layers
        self._batch = batch

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        layers = self._layers
        if layer == len(layers.key_caches) - 1:
            self.queries, self.keys = Queries(query, query.new_empty(0), scale, window, softcap), key
            raise ForwardEnded
        out: Tensor = prefix_attention(
            query,
            key,
            value,
            layers.key_caches[layer],
            layers.value_caches[layer],
            self._batch,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return out
